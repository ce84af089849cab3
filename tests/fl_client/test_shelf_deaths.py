"""A process may die after any file operation: what counted is then in its state, and what did not is not."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import torch

from tests.fl_client.shelves import assignment, leaves, outcome, shelf, state, update

ROOT = Path(__file__).parents[2]
CLIP = 0.5


class Death(BaseException):
    """The process ends here; nothing of it may be caught."""


class Fate:
    """Ends the process after its operation number `at` on files; a write is ended half way."""

    def __init__(self, patch, at):
        self._left = at
        for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync")):
            patch.setattr(owner, name, self._mortal(getattr(owner, name)))
        opened = Path.open
        patch.setattr(Path, "open", lambda path, *how, **more: self._watched(opened(path, *how, **more)))

    def _operation(self):
        self._left -= 1
        if self._left == 0:
            raise Death

    def _mortal(self, function):
        def mortal(*arguments, **more):
            result = function(*arguments, **more)
            self._operation()
            return result

        return mortal

    def _watched(self, file):
        return _Watched(file, self._operation) if "w" in file.mode else file


class _Watched:
    """A file whose writes have a middle."""

    def __init__(self, file, operation):
        self._file, self._operation = file, operation

    def __enter__(self):
        return self

    def __exit__(self, *ended):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def writelines(self, pieces):
        data = b"".join(map(bytes, pieces))
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._operation()
        self._file.write(data[len(data) // 2 :])


def live(folder, sent):
    """Three rounds: an update is kept, then sent (and then it counts, by half), then its outcome is heard."""
    for number in range(1, 4):
        kept = shelf(folder)
        kept.keep(update(number), leaves(number))
        sent.append(number)
        kept.settle(outcome(number, clip_factor=CLIP))


def come_back(folder, sent):
    """The state that a daemon works from in the next round, told what has counted."""
    counted = outcome(sent[-1], clip_factor=CLIP) if sent else None
    wanted = assignment(len(sent) + 1, counted)
    kept = shelf(folder)
    kept.resume(wanted)
    return kept.state_for(wanted)


def dies(monkeypatch, at, work):
    """Whether the work meets its end at operation number `at`."""
    with monkeypatch.context() as patch:
        Fate(patch, at)
        try:
            work()
        except Death:
            return True
    return False


def check(folder, sent):
    """The state asked for is here, whole, and that of the last update that was sent."""
    got = come_back(folder, sent)
    assert (got is None) is (not sent)
    if got is not None:
        name = "layer/0.weight"
        assert torch.equal(got["c_i"][name], state(10 * CLIP * sent[-1])["c_i"][name]), sent


def test_a_death_after_any_file_operation_leaves_one_state_or_the_other(tmp_path, monkeypatch):
    """In life, and again in the recovery from it: each update that was sent has left its state, no other has."""
    deaths = 0
    for first in count(1):
        sent = []
        if not dies(monkeypatch, first, lambda: live(tmp_path / f"{first}", sent)):  # noqa: B023 - called at once
            break
        for second in count(1):
            folder, sent = tmp_path / f"{first}-{second}", []
            dies(monkeypatch, first, lambda: live(folder, sent))  # noqa: B023 - called at once
            again = dies(monkeypatch, second, lambda: come_back(folder, sent))  # noqa: B023 - called at once
            check(folder, sent)
            if not again:
                break
            deaths += 1
    assert first > 3 * 8  # a round writes, syncs and renames two files, syncs two folders, and removes one file
    assert deaths > first


CHILD = """
import sys
from pathlib import Path
from itertools import count
from tests.fl_client.shelves import leaves, outcome, shelf, update
folder = Path(sys.argv[1])
for number in count(1):
    kept = shelf(folder)
    kept.keep(update(number % 250), leaves(number % 250))
    print("sent", number, flush=True)  # among the lines of the log
    kept.settle(outcome(number % 250, clip_factor=0.5))
"""


def test_a_killed_process_leaves_one_state_or_the_other(tmp_path):
    """SIGKILL in the middle of endless rounds: the state of the last update that was sent is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    before = [process.stdout.readline() for _ in range(41)]
    process.kill()
    lines = [*before, *process.communicate()[0].splitlines(keepends=True)]
    last = sum(line.startswith("sent ") and line.endswith("\n") for line in lines)
    assert 20 <= last < 250
    check(tmp_path, list(range(1, last + 1)))
