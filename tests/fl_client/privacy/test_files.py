"""Account and witness: a lost or older account is noticed, and a crash between two writes is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_client.errors import StateError
from fl_client.privacy.account import FILE
from fl_client.privacy.files import WITNESS, AccountFiles
from fl_common.privacy.accountant import Mechanism
from tests.processes.killed_daemon import kill_at

ONE = Mechanism(1.0, 0.1)


def used(folder: Path, charges: int = 2) -> AccountFiles:
    """The files of a directory that a daemon has claimed, after some charges."""
    files = AccountFiles(folder)
    files.begin()
    (folder / "identity.json").write_text("{}")
    for number in range(charges):
        account = files.read()
        assert account is not None
        files.write(account.with_charge(bytes([number]), ONE, 1, 1e-5))
    return files


def test_a_new_directory_has_an_empty_account(tmp_path: Path) -> None:
    """A start before the claim makes both files once; before it there is no account, which is no fault."""
    files = AccountFiles(tmp_path)
    assert files.read() is None
    files.begin()
    first = files.read()
    files.begin()
    assert first is not None
    assert (files.read(), first.charges) == (first, 0)


def _no_account(folder: Path) -> None:
    (folder / FILE).unlink()


def _no_witness(folder: Path) -> None:
    (folder / WITNESS).unlink()


def _neither(folder: Path) -> None:
    _no_account(folder)
    _no_witness(folder)


def _another(folder: Path) -> None:
    (folder / "other").mkdir()
    used(folder / "other", 5)
    (folder / "other" / FILE).replace(folder / FILE)


def _broken(folder: Path) -> None:
    (folder / WITNESS).write_text('{"account": "", "charges": -1, "resets": 0}')


FORGETFUL: list[tuple[Callable[[Path], None], str]] = [
    (_no_account, "the privacy account is missing"),
    (_no_witness, "number of the account's charges is missing"),
    (_neither, "the privacy account is missing"),
    (_another, "another account than"),
    (_broken, "expected what this daemon wrote"),
]


@pytest.mark.parametrize(("change", "message"), FORGETFUL, ids=[row[0].__name__ for row in FORGETFUL])
@pytest.mark.parametrize("charges", [0, 2])
def test_what_would_forget_charges_is_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str, charges: int
) -> None:
    """Also before the first charge, because nobody can tell then. The start makes nothing anew; a reset does."""
    files = used(tmp_path, charges)
    change(tmp_path)
    files.begin()
    with pytest.raises(StateError, match=message):
        files.read()
    files.reset(keep=False)
    account, witness = files.read(), files.witness()
    assert account is not None
    assert witness is not None
    assert (account.charges, witness.resets) == (0, 1)


def test_an_older_copy_is_refused(tmp_path: Path) -> None:
    """A backup of the account alone is behind its witness."""
    files = used(tmp_path)
    backup = (tmp_path / FILE).read_bytes()
    account = files.read()
    assert account is not None
    files.write(account.with_charge(b"new", ONE, 1, 1e-5))
    (tmp_path / FILE).write_bytes(backup)
    with pytest.raises(StateError, match="expected 3 charges or more, got an older copy with 2"):
        files.read()
    assert files.reset(keep=True) == account == files.read()


def life(folder: Path, sent: Path) -> None:
    """A daemon's start, a charge, and the update that is sent afterwards."""
    files = AccountFiles(folder)
    files.begin()
    (folder / "identity.json").write_text("{}")
    account = files.read()
    assert account is not None
    files.write(account.with_charge(b"%d" % account.charges, ONE, 1, 1e-5))
    sent.write_bytes(account.secret)


def killed_at(step: int, folder: Path, sent: Path) -> bool:
    """Live in a process of its own that SIGKILL ends before its nth change of a file. False if it has fewer."""
    if (child := os.fork()) == 0:
        kill_at(step, str(folder))
        try:
            life(folder, sent)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("charges", [0, 2], ids=["the first start", "later"])
def test_a_kill_at_any_write_needs_no_reset_and_loses_no_charge(tmp_path: Path, charges: int) -> None:
    """What was sent is charged, under the secret that the next life uses; a charge of unsent work may be there too."""
    step, killed = 1, True
    while killed:
        folder, sent = tmp_path / f"state-{step}", tmp_path / f"sent-{step}"
        folder.mkdir()
        before = None
        if charges:
            before = used(folder, charges).read()
        killed = killed_at(step, folder, sent)
        assert sent.exists() != killed
        files = AccountFiles(folder)
        files.begin()
        account = files.read()
        assert account is not None
        assert charges + (not killed) <= account.charges <= charges + 1
        assert before is None or account.secret == before.secret
        assert killed or account.secret == sent.read_bytes()
        life(folder, sent)
        assert files.read() == account.with_charge(b"%d" % account.charges, ONE, 1, 1e-5)
        step += 1
    assert step > 5
