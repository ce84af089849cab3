"""A device that trains with privacy: a power cut leaves all charges of what it sent, and the same secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fl_client.privacy.files import AccountFiles
from fl_client.storage.device_storage import DeviceStorage
from fl_client.storage.state import StateDir
from fl_common.privacy.accountant import Mechanism
from tests.fl_client.storages import leaves, outcome, update
from tests.marks import slow_except
from tests.power.drives import Cut, after_each, put
from tests.power.recorder import Operation, Recorder
from tests.power.test_daemon import CUTS

ROUNDS = (1, 2, 3)
STEPS, DELTA = 5, 1e-5
MECHANISM = Mechanism(1.5, 0.1)


@dataclass(frozen=True, slots=True)
class Released:
    """What others have of the device."""

    steps: int = 0
    """Steps of the updates that it sent."""
    secret: bytes = b""
    """The secret of their noise."""


def start(here: StateDir) -> AccountFiles:
    """The start of a daemon."""
    files = AccountFiles(here.path)
    files.begin()
    here.claim("edge-1")
    return files


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    """The operations of a device that charges, trains, saves and sends in each round, with a start in each."""
    recorder = Recorder(tmp_path_factory.mktemp("device"))
    with recorder.recording():
        for round_ in ROUNDS:
            with StateDir(recorder.folder / "state") as here:
                files = start(here)
                account = files.read()
                assert account is not None
                files.write(account.with_charge(bytes([round_]), MECHANISM, STEPS, DELTA))
                storage = DeviceStorage(here.pending, here.states)
                storage.save(update(round_), leaves(round_))
                recorder.report(Released(round_ * STEPS, account.secret))
                storage.settle(outcome(round_, counted=True))
    return recorder.record


@pytest.mark.parametrize("how", slow_except(CUTS.values(), CUTS["all-that-was-written"], CUTS["drawn-1"]), ids=CUTS)
def test_a_cut_after_any_operation_loses_no_charge(tmp_path: Path, record: Sequence[Operation], how: Cut) -> None:
    """The next start reads the account, needs no reset, and charges further under the same secret."""
    for at, drive in enumerate(after_each(record)):
        released = drive.reported or Released()
        folder = tmp_path / str(at)
        put(drive.cut(replace(how, seed=1000 * how.seed + at)), folder)
        with StateDir(folder / "state") as here:
            files = start(here)
            account = files.read()
            assert account is not None
            assert account.spent.get(MECHANISM, 0) >= released.steps
            assert not released.secret or account.secret == released.secret
            files.write(account.with_charge(b"next", MECHANISM, STEPS, DELTA))
            again = files.read()
            assert again is not None
            assert again.spent[MECHANISM] >= released.steps + STEPS
