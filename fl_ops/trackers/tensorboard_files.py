"""Event files for TensorBoard, in a folder for each run. What the files of the folder have is not written again.

The files are written with TensorBoard's own package, which needs neither TensorFlow nor torch. Values are float32: the
form of scalars that every reader of event files knows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from fl_common.files import FileLock, FileLocked
from fl_ops.errors import Refused, UsageError
from fl_ops.files import file_name
from fl_ops.trackers.facts import RoundFacts, RunFacts, TrackedRun

IDENTITY, LOCK = "impetus-run.txt", ".impetus-lock"
_TEXT = "settings"


class TensorBoardRun(TrackedRun):
    """The event files of one run. They have no end and no models."""

    def __init__(self, place: Path, run: RunFacts) -> None:
        """place: the folder that TensorBoard shows; the run's files go into a folder with its name.

        Raises:
            UsageError: the folder has another run of this name.
            Refused: another process writes to it now, it cannot be written, or the run's name is no name of a folder.
        """
        self.folder = place / file_name("a run's id", run.name)
        self._run = run
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / LOCK, "")
            self._check_identity()
        except FileLocked as error:
            raise Refused(f"{self.folder}: another process writes this run's event files now") from error
        except OSError as error:
            raise Refused(f"{self.folder} cannot be written: {error.strerror or error}") from error
        self._written = set(_written(self.folder))
        self._writer: EventFileWriter | None = None

    @property
    def place(self) -> str:
        """The run's folder."""
        return str(self.folder)

    def write(self, round_: RoundFacts) -> int:
        """Write a round's values that are not there. Returns their number; they are in the file then."""
        new = {name: value for name, value in round_.values.items() if (name, round_.round) not in self._written}
        for name, value in sorted(new.items()):
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=name, simple_value=value)])
            self._add(summary, round_.round, round_.time)
        if new and self._writer is not None:
            self._writer.flush()
        self._written |= {(name, round_.round) for name in new}
        return len(new)

    def close(self) -> None:
        """Close the file and release the folder."""
        if self._writer is not None:
            self._writer.close()
        self._lock.release()

    def _check_identity(self) -> None:
        path = self.folder / IDENTITY
        if not path.exists():
            path.write_text(self._run.identity + "\n", encoding="utf-8")
        identity = path.read_text(encoding="utf-8").strip()
        if identity != self._run.identity:
            raise UsageError(
                f"{self.folder} has another run of this name: expected {self._run.identity!r}, found {identity!r}; "
                "choose another folder for --tensorboard"
            )

    def _add(self, summary: summary_pb2.Summary, step: int, time: float) -> None:
        """Add an event to this process's file, which begins with the settings if no other file has them."""
        if self._writer is None:
            # One file for each process that has something to add: TensorBoard reads them as one.
            self._writer = EventFileWriter(str(self.folder))
            if (_TEXT, 0) not in self._written:
                settings = self._run.settings
                began = time if self._run.began is None else self._run.began
                table = "\n".join(f"| {name} | {settings[name]} |" for name in sorted(settings))
                self._add(text_pb(_TEXT, f"| setting | value |\n| --- | --- |\n{table}"), 0, began)
                self._add(hparams_pb(dict(settings), self._run.name, began), 0, began)
        self._writer.add_event(event_pb2.Event(wall_time=time, step=step, summary=summary))


def _written(folder: Path) -> Iterator[tuple[str, int]]:
    """(tag, step) of each value in the event files of a folder. A last record that was cut off counts as missing."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # its note on a record that was cut off
    for path in sorted(folder.glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            yield from ((value.tag, event.step) for value in event.summary.value)
