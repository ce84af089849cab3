"""The account's file with a witness beside it, so that a lost or an older account is noticed.

`privacy-charges.json` has the number of charges and which account they are of. A charge writes the account first, then
the witness, and work begins after both. So an account that is behind its witness is an older copy. Both files are made
before `identity.json`: where that is and one of them is not, it was removed. A state directory that is replaced as a
whole has no witness of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from fl_client.errors import StateError
from fl_client.privacy.account import FILE, Account, read_account, write_account
from fl_common.files import atomic_writer, make_folders
from fl_common.settings import parse_json
from fl_common.units import counted

WITNESS = "privacy-charges.json"
"""The witness's name in the state directory."""
_USED = "identity.json"
_REMEDY = (
    "restore the newest copy. If there is none, what was spent cannot be known: `fl-client privacy reset` begins a new"
    " account, for data that no run has used"
)


@dataclass(frozen=True, slots=True)
class Witness:
    """What is known of an account without its file."""

    account: str
    """Digest of its secret."""
    charges: int
    resets: int = 0
    """How often the owner began a new account."""


class AccountFiles:
    """Account and witness in a state directory. All methods block."""

    def __init__(self, folder: Path, used: Path | None = None) -> None:
        """used: a file that is made after the account, so that an account that is missing later is known to be lost."""
        self.folder, self._used = folder, used or folder / _USED

    @classmethod
    def of(cls, state_dir: Path, data: str) -> AccountFiles:
        """The files for data of this name, in a state directory. No name: those of all data without one."""
        folder = state_dir / "data" / data
        return cls(folder, folder.with_name(f"{data}.json")) if data else cls(state_dir)

    def begin(self) -> None:
        """Make both files in a directory that no daemon has used. Raises OSError, StateError."""
        if not self._used.exists() and not (self.folder / WITNESS).exists():
            make_folders(self.folder, durable=True)
            self.write(self._account() or Account.new())

    def read(self) -> Account | None:
        """The account; None before the first use. Raises StateError for one that is lost, older or cannot be read."""
        account, witness, used = self._account(), self.witness(), self._used.exists()
        if account is None and witness is None and not used:
            return None
        if account is None:
            raise StateError(f"{self.folder / FILE}: the privacy account is missing: {_REMEDY}")
        if witness is None and (used or account.charges):
            raise StateError(f"{self.folder / WITNESS}: the number of the account's charges is missing: {_REMEDY}")
        if witness is not None and witness.account != _digest(account):
            raise StateError(f"{self.folder / FILE}: this is another account than {WITNESS} counts: {_REMEDY}")
        if witness is not None and witness.charges > account.charges:
            raise StateError(
                f"{self.folder / FILE}: expected {counted(witness.charges, 'charge')} or more, got an older copy with"
                f" {account.charges}: {_REMEDY}"
            )
        return account

    def write(self, account: Account) -> None:
        """Replace both files, durably, the account first. Raises OSError, StateError."""
        write_account(self.folder / FILE, account)
        self.count(account)

    def count(self, account: Account) -> None:
        """Write the witness of an account that is written, unless it is there. Raises OSError, StateError.

        After a kill between the two files the witness is behind the account, and would accept its older copy.
        """
        before = self.witness()
        now = Witness(_digest(account), account.charges, 0 if before is None else before.resets)
        if now != before:
            self._write_witness(now)

    def reset(self, *, keep: bool) -> Account:
        """Begin a new account, or go on with the file that is there. Raises OSError, StateError."""
        kept = self._account() if keep else None
        if keep and kept is None:
            raise StateError(f"{self.folder / FILE}: expected an account to go on with, found none")
        try:
            before = self.witness()
        except StateError:
            before = None
        account = kept or Account.new()
        write_account(self.folder / FILE, account)
        self._write_witness(Witness(_digest(account), account.charges, 1 + (0 if before is None else before.resets)))
        return account

    def witness(self) -> Witness | None:
        """The witness; None if there is none. Raises StateError for other content."""
        path = self.folder / WITNESS
        try:
            return _parsed(parse_json(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StateError(f"{path}: expected what this daemon wrote, got {error}: {_REMEDY}") from None

    def resets(self) -> int:
        """How often the owner began a new account, or went on with an older copy; 0 if that cannot be read."""
        try:
            witness = self.witness()
        except StateError:
            return 0
        return 0 if witness is None else witness.resets

    def _account(self) -> Account | None:
        return read_account(self.folder / FILE)

    def _write_witness(self, witness: Witness) -> None:
        content = {"account": witness.account, "charges": witness.charges, "resets": witness.resets}
        with atomic_writer(self.folder / WITNESS) as file:
            file.write(json.dumps(content).encode())


def _digest(account: Account) -> str:
    return str(blake3(account.secret, derive_key_context="impetus privacy account").hexdigest())


def _parsed(content: Any) -> Witness:
    witness = Witness(content["account"], content["charges"], content["resets"])
    numbers = (witness.charges, witness.resets)
    if not isinstance(witness.account, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"no account with its numbers of charges and resets: {content!r:.200}")
    return witness
