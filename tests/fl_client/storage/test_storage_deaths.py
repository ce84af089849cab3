"""After a death at any file operation the state has the counted updates and no others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import IO, Any, Self

import pytest
import torch

from tests.fl_client.storage.endless import CLIP
from tests.fl_client.storages import assignment, leaves, outcome, state, storage, update
from tests.processes.forks import Forked, Program
from tests.processes.process import TIMEOUT_S, eventually

ROOT = Path(__file__).parents[3]
ROUNDS = 2
"""The second round replaces the state of the first."""


class Death(BaseException):
    """The simulated death of the process, which no handler may catch."""


class DeathAfter:
    """Ends the process after its file operation number `at`. A write ends half way."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, more: Iterable[tuple[Any, str]] = ()) -> None:
        """more: further operations, as owner and name."""
        self._left = at
        for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync"), *more):
            patch.setattr(owner, name, self._mortal(getattr(owner, name)))
        opened = Path.open
        patch.setattr(Path, "open", lambda path, *how, **more: self._watched(opened(path, *how, **more)))

    def _operation(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise Death

    def _mortal(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def mortal(*arguments: Any, **more: Any) -> Any:
            result = function(*arguments, **more)
            self._operation()
            return result

        return mortal

    def _watched(self, file: IO[Any]) -> Any:
        return _Watched(file, self._operation) if "w" in file.mode else file


class _Watched:
    """A file that may die in the middle of a write."""

    def __init__(self, file: IO[Any], operation: Callable[[], None]) -> None:
        self._file, self._operation = file, operation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def writelines(self, pieces: Iterable[Any]) -> None:
        data = b"".join(map(bytes, pieces))
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._operation()
        self._file.write(data[len(data) // 2 :])


def run_rounds(folder: Path, sent: list[int]) -> None:
    """Run two rounds: an update is saved, then sent (from then on half of it counts), then its outcome arrives."""
    for number in range(1, ROUNDS + 1):
        kept = storage(folder)
        kept.save(update(number), leaves(number))
        sent.append(number)
        kept.settle(outcome(number, clip_factor=CLIP))


def recover(folder: Path, sent: list[int]) -> Any:
    """The state for the next round, with an assignment that names the counted update."""
    counted = outcome(sent[-1], clip_factor=CLIP) if sent else None
    wanted = assignment(len(sent) + 1, counted)
    kept = storage(folder)
    kept.resume(wanted)
    return kept.state_for(wanted)


def dies(monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], None]) -> bool:
    """Whether the work reaches operation `at` and dies there."""
    with monkeypatch.context() as patch:
        DeathAfter(patch, at)
        try:
            work()
        except Death:
            return True
    return False


def check(folder: Path, sent: list[int]) -> None:
    """Check that the state is that of the last sent update."""
    got = recover(folder, sent)
    assert (got is None) is (not sent)
    if got is not None:
        name = "layer/0.weight"
        assert torch.equal(got["c_i"][name], state(10 * CLIP * sent[-1])["c_i"][name]), sent


def test_a_death_after_any_file_operation_leaves_one_state_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state has each sent update and no other, also after a death during recovery."""
    deaths = 0
    sent: list[int]
    for first in count(1):
        sent = []
        if not dies(monkeypatch, first, lambda: run_rounds(tmp_path / f"{first}", sent)):  # noqa: B023 - called at once
            break
        for second in count(1):
            folder, sent = tmp_path / f"{first}-{second}", []
            dies(monkeypatch, first, lambda: run_rounds(folder, sent))  # noqa: B023 - called at once
            again = dies(monkeypatch, second, lambda: recover(folder, sent))  # noqa: B023 - called at once
            check(folder, sent)
            if not again:
                break
            deaths += 1
    assert first > ROUNDS * 8  # a round writes, syncs and renames two files, syncs two folders, and removes one file
    assert deaths > first


def test_a_killed_process_leaves_one_state_or_the_other(tmp_path: Path) -> None:
    """After SIGKILL during endless rounds the state is that of the last sent update."""
    folder, out = tmp_path / "state", tmp_path / "out"
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    process = Forked(Program("tests.fl_client.storage.endless", [str(folder)], environment, tmp_path, out, out))
    eventually(lambda: out.exists() and out.read_text().count("sent ") > 20, "it has sent twenty updates")
    process.kill()
    process.wait(TIMEOUT_S)
    last = sum(line.startswith("sent ") and line.endswith("\n") for line in out.read_text().splitlines(keepends=True))
    assert 20 <= last < 250
    check(folder, list(range(1, last + 1)))
