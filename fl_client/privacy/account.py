"""The file of the account, `privacy.json` in the state directory: the secret and what all runs have spent.

Both are in one file, which is replaced as a whole: no crash leaves a secret without its account.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_client.errors import StateError
from fl_common.files import atomic_writer
from fl_common.privacy.accountant import Mechanism, epsilon_of
from fl_common.privacy.secret_stream import SECRET_BYTES
from fl_common.settings import parse_json

FILE = "privacy.json"
"""Name of the file in the state directory."""
REMEMBERED = 256
"""Charges whose work is known: the same work again costs nothing, for its result is the same."""


@dataclass(frozen=True, slots=True)
class Account:
    """A secret, and what was spent under it. Charges only add up."""

    secret: bytes = field(repr=False)
    spent: Mapping[Mechanism, int] = field(default_factory=dict)
    """Steps of each mechanism."""
    delta: float = 1.0
    """The smallest delta of a charge; 1: there is none."""
    charges: int = 0
    """The number of charges, of which `charged` has the latest."""
    charged: tuple[str, ...] = ()
    """Identities of the latest charges in hex, the newest last."""

    @classmethod
    def new(cls) -> Account:
        """An empty account with a new secret."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    def has(self, identity: bytes) -> bool:
        """Whether this very work is charged."""
        return identity.hex() in self.charged

    def with_charge(self, identity: bytes, mechanism: Mechanism, steps: int, delta: float) -> Account:
        """The account after a charge."""
        spent = {**self.spent, mechanism: self.spent.get(mechanism, 0) + steps}
        charged = (*self.charged, identity.hex())[-REMEMBERED:]
        return replace(self, spent=spent, delta=min(self.delta, delta), charges=self.charges + 1, charged=charged)

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of everything that was spent. delta: None: the smallest of the charges."""
        wanted = self.delta if delta is None else delta
        return epsilon_of(self.spent, wanted) if self.spent else 0.0


def read_account(path: Path) -> Account | None:
    """The account in a file; None if there is none. Raises StateError for other content, which is never replaced."""
    try:
        return _parsed(parse_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path}: expected the privacy account that this daemon wrote, got {error}; restore the newest copy of it"
        ) from None


def write_account(path: Path, account: Account) -> None:
    """Replace the file, durably; only its owner may read it. Raises OSError."""
    content = {
        "secret": account.secret.hex(),
        "delta": account.delta,
        "spent": [
            {"noise_multiplier": mechanism.noise_multiplier, "rate": mechanism.rate, "steps": steps}
            for mechanism, steps in sorted(account.spent.items())
        ],
        "charges": account.charges,
        "charged": account.charged,
    }
    with atomic_writer(path) as file:  # a temporary name of its own has mode 0600
        file.write(json.dumps(content).encode())


def _parsed(content: Any) -> Account:
    spent = {
        Mechanism(float(entry["noise_multiplier"]), float(entry["rate"])): _count(entry["steps"])
        for entry in content["spent"]
    }
    secret, delta = bytes.fromhex(content["secret"]), float(content["delta"])
    if len(secret) != SECRET_BYTES or not 0.0 < delta <= 1.0:
        raise ValueError("no secret of 32 bytes, or a delta out of range")
    charged = tuple(map(str, content["charged"]))
    charges = content["charges"]
    if type(charges) is not int or charges < len(charged):
        raise ValueError(f"a number of charges that is no whole number, or less than the known ones: {charges!r}")
    return Account(secret, spent, delta, charges, charged)


def _count(steps: Any) -> int:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"a number of steps that is no whole number over 0: {steps!r}")
    return steps
