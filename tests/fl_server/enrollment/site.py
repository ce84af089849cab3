"""An authority in files, and an issuer with its ledger."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_common.certificates.pem import PemFiles, PemWatcher
from fl_server.enrollment.authority import Authority
from fl_server.enrollment.grants import Revocations, TokenActions, TokenSpec
from fl_server.enrollment.issuing import Checks, Issuer
from fl_server.errors import Forbidden
from fl_server.identity import Identity
from fl_server.settings.sections import EnrollmentConfig
from fl_server.store.database.store import open_sqlite
from fl_server.store.ledger import Ledger
from fl_server.store.records import ClientRecord
from tests.fl_server.harness import ledger_file
from tests.processes.certificates import Pki
from tests.processes.enrollment import write_key


def authority_of(pki: Pki, **settings: Any) -> Authority:
    """The coordinator's authority with the files of this one."""
    server = pki.issue("server", "coordinator")
    return Authority(config_of(pki, **settings), PemWatcher(PemFiles(server.cert, server.key, server.ca)))


def config_of(pki: Pki, **settings: Any) -> EnrollmentConfig:
    """A section [enrollment]."""
    return EnrollmentConfig.model_validate({"ca_cert": pki.ca, "ca_key": write_key(pki), **settings})


@dataclass
class Site:
    """An issuer with its parts. Made on the event loop."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    banned: set[str] = field(default_factory=set)
    roster: dict[str, ClientRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pki = Pki(self.folder / "pki")
        self.ledger = Ledger(open_sqlite(ledger_file(self.folder)))
        self.revocations = Revocations(self.ledger)
        self.threads = ThreadPoolExecutor(2)
        checks = Checks(self.revocations, self._refuse, self.roster.get)
        config = config_of(self.pki, **self.settings)
        self.issuer = Issuer(self.ledger, config, authority_of(self.pki, **self.settings), checks, self.threads)
        self.tokens = TokenActions(self.ledger, config.token_ttl_s)

    def _refuse(self, who: Identity) -> None:
        if who.name in self.banned:
            raise Forbidden(str(who), "to be unbanned")

    async def token(self, name: str = "", ttl_s: float = 0, **spec: Any) -> str:
        """A new token's text."""
        values = {"name": name, "prefix": "", "uses": 0, "labels": {}, **spec}
        made = await self.tokens.create([TokenSpec(**values)], ttl_s, "admin:alice")
        return made[0].token.text

    def close(self) -> None:
        """End the threads."""
        self.ledger.close()
        self.threads.shutdown()


def registered(name: str, **changes: Any) -> ClientRecord:
    """A client on the roster."""
    return ClientRecord(name, 1.0, 2.0, instance_id=f"{name}-1", **changes)


def holder(name: str = "edge-7", **changes: Any) -> Identity:
    """A client with a valid certificate."""
    values: dict[str, Any] = {"ends": time.time() + 60, "begins": time.time() - 300, "serial": "a1", "key": "b2" * 32}
    return Identity("client", name, **{**values, **changes})
