"""The folder of a run's save. The process can be killed at any time: the latest save stays whole.

run-simulation/round-000012/    the checkpoint, as a coordinator writes it; its facts name all that belongs to it
states/000012-client-007        client states, with the digest of their bytes
rounds.jsonl                    the results of the rounds
lock                            held by the process that uses the folder
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from fl_client.storage.client_state_store import Damaged
from fl_common.files import FileLock, FileLocked
from fl_ops.errors import Refused, UsageError
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.saving.files import History, StateFiles, differences, program_digest
from fl_ops.simulate.saving.point import facts_of, point_of
from fl_ops.simulate.simulation import Simulation
from fl_server.rounds.state import Phase
from fl_server.store.checkpoints import Checkpoint, Checkpoints
from fl_server.store.errors import StoreError

SAVE_EVERY_S = 30.0
"""Seconds between two saves, unless the user sets others."""

_FORMAT = 1
_RUN = "simulation"
_SHARE = 0.05
"""Most of the time that saves may take: a save that takes long is made less often."""
_SHOWN = 5
"""Differences that a message lists."""


class RunSave:
    """The save of one run; a context manager, which holds the folder's lock.

    Args:
        folder: made if it is missing.
        settings: JSON values that decide the run's results. A save with other settings is not continued.
        every_s: seconds between two saves; 0 saves after every round.

    Raises:
        Refused: another process uses the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], every_s: float = SAVE_EVERY_S) -> None:
        self._folder = folder
        self._settings = json.loads(json.dumps({**settings, "program": program_digest()}))
        self._every_s = every_s
        with self._as_refusals():
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / "lock", "")
            self._open()

    def _open(self) -> None:
        self._checkpoints = Checkpoints(self._folder)
        self._states = StateFiles(self._folder / "states")
        self._history = History(self._folder / "rounds.jsonl")
        self._saved: tuple[int, bool] | None = None
        self._next = time.monotonic() + self._every_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def begin(self) -> None:
        """Remove what is saved. Raises UsageError if it is a run that has not ended."""
        if (latest := self._latest()) is not None and latest.facts["point"]["state"]["phase"] != Phase.ENDED.value:
            raise UsageError(
                f"{self._folder.parent} has a run that was stopped after round {latest.facts['round']}: continue it"
                f" with --continue, or remove {self._folder} to begin again"
            )
        with self._as_refusals():
            for path in self._folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
            self._open()

    def restore(self, simulation: Simulation) -> list[RoundResult]:
        """Put a new simulation where the save is. Returns the results until then; without a save, none.

        Raises Refused: the save has other settings, was made by another version of the program, or is damaged.
        """
        latest = self._latest()
        if latest is None:
            return []
        self._check(latest.facts)
        with self._as_refusals():
            results = self._history.read(latest.facts["history"])
            self._states.put_back(simulation.federation.states, latest.facts["states"])
            self._states.remove_others()
        snapshot = simulation.federation.engine.restored(latest)
        point = point_of(latest.facts["point"], snapshot, simulation.first_state)
        simulation.continue_from(point, results)
        self._saved = (snapshot.round, point.state.phase is Phase.ENDED)
        return results

    def rounds(self, simulation: Simulation, earlier: Sequence[RoundResult] = ()) -> Generator[RoundResult]:
        """`simulation.rounds()`, saved at times, and when it stops for any reason. Close the iterator before the run.

        earlier: the results that `restore` returned.
        """
        results = [*earlier]
        try:
            for result in simulation.rounds():
                results.append(result)
                if time.monotonic() >= self._next:
                    self._save(simulation, results)
                yield result
        finally:
            self._save(simulation, results)

    def _save(self, simulation: Simulation, results: Sequence[RoundResult]) -> None:
        """Save the run's point, if it has one that is not saved. Raises Refused if it cannot be written."""
        point = simulation.point
        if point is None:
            return
        round_, ended = point.federation.snapshot.round, point.state.phase is Phase.ENDED
        if self._saved == (round_, ended):
            return
        began = time.monotonic()
        with self._as_refusals():
            self._history.append(results[self._history.count : round_ + 1])
            if ended:
                self._states.versions.clear()  # nothing follows that would need them
            else:
                self._states.save(simulation.federation.states, round_)
            facts = {
                "save_format": _FORMAT,
                "settings": self._settings,
                "point": facts_of(point),
                "history": self._history.facts,
                "states": self._states.versions,
            }
            checkpoint = simulation.federation.engine.snapshots.checkpoint(point.federation.snapshot, facts)
            self._checkpoints.save(_RUN, round_, checkpoint)
            self._checkpoints.prune(_RUN, {round_})
            self._states.remove_others()
        self._saved = (round_, ended)
        now = time.monotonic()
        self._next = now + pause(self._every_s, now - began)

    def _latest(self) -> Checkpoint | None:
        with self._as_refusals():
            latest = self._checkpoints.latest(_RUN)
        if latest is None and list(self._folder.glob("run-*/*.damaged")):
            raise Refused(
                f"the save in {self._folder} is damaged: remove the folder to simulate again from the beginning"
            )
        return latest

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Raises Refused if the save cannot be continued here."""
        if facts.get("save_format") != _FORMAT:
            difference = "another version of the program made it"
        else:
            difference = "; ".join(list(differences(facts["settings"], self._settings))[:_SHOWN])
        if difference:
            raise Refused(
                f"the save in {self._folder} cannot be continued with the same results: {difference}. Use the"
                " settings and the program of the save, or simulate into another folder"
            )

    @contextmanager
    def _as_refusals(self) -> Iterator[None]:
        try:
            yield
        except FileLocked as error:
            raise Refused(f"another process uses {self._folder}: wait until it ends, or use another folder") from error
        except Damaged as error:
            raise Refused(
                f"the save in {self._folder} has a damaged client state ({error}): remove the folder to simulate again"
                " from the beginning"
            ) from error
        except (OSError, StoreError) as error:
            raise Refused(f"the save in {self._folder} cannot be read or written: {error}") from error


def pause(every_s: float, took_s: float) -> float:
    """Seconds until the next save, after one that took so long."""
    return max(every_s, took_s / _SHARE) if every_s else 0.0
