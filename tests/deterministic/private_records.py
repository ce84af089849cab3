"""What a life shows of privacy of records: the account behind each private step, and the noise of each update.

The accounts have the secrets of a simulation, so a replay makes the same updates. All else is the daemon's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from fl_client.privacy.account import FILE, Account, read_account
from fl_client.privacy.files import AccountFiles
from fl_client.training.private import PrivateWork
from fl_client.training.trainer import Trainer
from fl_common.privacy.accountant import Mechanism, epsilon_of
from fl_ops.simulate.engines.client_work import simulated_secret
from protos.fl.v1 import coordinator_pb2 as pb
from tests.deterministic.loop import CURRENT
from tests.deterministic.plan import BASE, RECORD_PRIVACY
from tests.processes.tiny_task import TRAIN

LIMITED = "c-0"
"""The client whose site has a limit: of one assignment's steps, and a half of another's."""
STEPS = BASE["local"]["steps"]


def policy_of(client: str, clients: int, folder: Path) -> Path | None:
    """The policy file of a client's site; None: it has none. clients: of the partition."""
    if client != LIMITED:
        return None
    path = folder / "policy.toml"
    if not path.exists():
        floors = "min_batch_size = 1\nmin_examples = 1\nmin_clients = 1"
        path.write_text(f"[privacy]\nmax_epsilon = {limit(clients)}\n[work]\n{floors}\n", encoding="utf-8")
    return path


def limit(clients: int) -> float:
    """The `max_epsilon` of the limited site."""
    mechanism = Mechanism(RECORD_PRIVACY["noise_multiplier"], BASE["local"]["batch_size"] * clients / TRAIN)
    return epsilon_of({mechanism: STEPS + STEPS // 2}, RECORD_PRIVACY["delta"])


@dataclass
class PrivateRecords:
    """One life's private work."""

    violations: list[str]
    """The life's."""
    folder: Path
    """With the state directory of each client."""
    max_epsilon: float
    """Of the limited client."""
    lied: AbstractSet[bytes]
    """The digests of updates that no device has made."""
    by_work: dict[tuple[str, bytes], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """(client, identity of its work) -> the digests of its updates."""
    by_key: dict[tuple[str, bytes], set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """(client, key of its noise) -> the identities of the work that got it."""
    sent: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """Client -> the digests of what it sent since it had an empty directory."""

    def _account(self, client: str) -> Account:
        found = read_account(self.folder / client / FILE)
        assert found is not None
        return found

    def _begins(self, client: str, private: PrivateWork) -> None:
        """A device makes the first of its private steps."""
        account, witness = self._account(client), AccountFiles(self.folder / client).witness()
        if private.identity.hex() not in account.charged:
            self.violations.append(f"private steps are charged before the first one: those of {client} are not")
        if witness is None or witness.charges < account.charges:
            where = f"{client} has {account.charges} charges, and its witness is {witness}"
            self.violations.append(f"a charge is counted beside the account before its steps: {where}")
        spent = account.epsilon()
        if client == LIMITED and spent > self.max_epsilon:
            self.violations.append(f"a device stops at its own limit: {client} has spent {spent:.3g}")
        self.by_key[client, private.key].add(private.identity)
        if len(self.by_key[client, private.key]) > 1:
            self.violations.append(f"no two updates of a device share noise: two of {client} do")

    def _ends(self, client: str, private: PrivateWork, digest: bytes) -> None:
        """A device has an update."""
        self.by_work[client, private.identity].add(digest)
        if len(self.by_work[client, private.identity]) > 1:
            self.violations.append(f"the same private work has the same bits: that of {client} has not")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the training of the life's devices, and give them the secrets of a simulation."""
        train = Trainer.train

        def trained(trainer: Trainer, assignment: Any, bundles: Any, state: Any, on_step: Any, private: Any) -> Any:
            process = CURRENT.get()
            if process is None or private is None:  # a replay, or another run
                return train(trainer, assignment, bundles, state, on_step, private)
            self._begins(process.name, private)
            result = train(trainer, assignment, bundles, state, on_step, private)
            self._ends(process.name, private, result.update.header.digest.value)
            return result

        def new_account() -> Account:
            process = CURRENT.get()
            assert process is not None
            return Account(simulated_secret(process.name))

        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(Trainer, "train", trained))
            patches.enter_context(mock.patch.object(Account, "new", new_account))
            yield

    def sends(self, client: str, method: str, message: bytes) -> None:
        """A device sends a message."""
        if method != "SubmitUpdate":
            return
        part = pb.SubmitUpdateRequest.FromString(message)
        if not part.HasField("header") or part.header.digest.value in self.lied:
            return
        self.sent[client].add(part.header.digest.value)
        charged, updates = sum(self._account(client).spent.values()), len(self.sent[client])
        if charged < STEPS * updates:
            where = f"{client} has {charged} steps on its account and sent {updates} updates of {STEPS}"
            self.violations.append(f"a device is charged for all that it sent: {where}")

    def forgets(self, client: str) -> None:
        """A device has lost its directory, and with it what was spent, as the page says."""
        self.sent.pop(client, None)

    def check(self) -> None:
        """Check a run that is over. Raises AssertionError."""
        for client in self.sent:
            account = self._account(client)
            works = f"{client} has {account.charges} charges of {len(set(account.charged))} works"
            assert len(set(account.charged)) == account.charges, f"the same private work is charged once: {works}"
