"""The points at which the coordinator can die: before, inside and behind every durable write of a round.

The coordinator itself has no hook for this. `python -m tests.chaos.server` wraps the functions named here. The wrapper
reads the order, a file such as `{"id": 3, "point": "before commit", "nth": 1}` next to the settings, before and after
each call. At the nth pass of the ordered point the process renames the file and kills itself with SIGKILL.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Write:
    """One durable write."""

    name: str
    where: str
    """module:function or module:class.method of the write."""
    times: int = 1
    """Least number of passes in every round."""
    sides: tuple[str, ...] = ("before", "behind")


STORE, CHECKPOINTS = "fl_server.store.database.store:Store", "fl_server.store.checkpoints"
SPOOL, PARTS = "fl_server.store.spool.spool:Spool", "fl_server.store.spool.part_file"

EVERY_ROUND = (
    Write("attempt", f"{STORE}.open_attempt"),
    Write("part file", f"{SPOOL}.open_part", 3),
    Write("chunk", f"{PARTS}:PartFile.write", 12),
    # The bytes are written, and their note is not.
    Write("chunk's note", f"{PARTS}:PartFile._write_note", 12, ("before",)),
    Write("seal", f"{PARTS}:PartFile.seal", 3),
    Write("ledger line", f"{STORE}.record_update", 3),
    Write("accepted list", f"{STORE}.fix_accepted"),
    Write("checkpoint", f"{CHECKPOINTS}:Checkpoints.save"),
    # The complete files have a temporary name and get their final one.
    Write("checkpoint's rename", f"{CHECKPOINTS}:_put_in_place"),
    Write("commit", f"{STORE}.commit"),
    Write("outcomes", "fl_server.run.effects:send_outcomes"),
    Write("spool's removal", f"{SPOOL}.remove_round"),
    Write("old checkpoint's removal", f"{CHECKPOINTS}:Checkpoints.prune"),
    Write("metrics", f"{STORE}.set_metrics"),
)
AT_THE_END = (Write("run's end", f"{STORE}.update_run"), Write("run's spool", f"{SPOOL}.remove_run"))
"""Every run passes these at least once, at its end."""
NEW_EPOCH = (Write("new epoch", f"{STORE}.restart_round"),)
"""Passed only when client states are lost."""

TOGETHER = (Write("ledger lines", f"{STORE}.record_updates"),)
"""Passed only when verdicts are written together: those that come while the ledger is busy with another one."""
FILES = "fl_server.store.objects.files:StoredFiles"
IN_OBJECTS = (
    Write("part's object", f"{FILES}.send", 3),
    # The objects are there, and the ledger does not count them.
    Write("object's row", f"{STORE}.add_stored_files", 4),
    Write("removal's row", f"{STORE}.remove_stored_files", 2),
)
"""Passed in every round of a coordinator with an object store."""
REMOVALS = (Write("objects' removal", f"{STORE}.objects_removed", sides=("before", "behind")),)
"""Passed some seconds after a round, while the coordinator is at work."""
SECRETS = "fl_server.store.state_directory:RunSecrets"
PRIVATE = (Write("run's secret", f"{SECRETS}.make"), Write("charge's outside count", f"{SECRETS}.counted"))
"""Passed by a run with privacy of clients: the first when it is created, the second in every round."""
OF_WORKERS = (
    # The machine's copy of a resource, in a worker; the upload that a worker may write, at the coordinator.
    Write("resource's copy", "fl_server.worker.service:Copies._fetch"),
    Write("reservation", f"{SPOOL}.reserve", 2),
)
"""Passed in every round whose bytes workers move, with the first writes of an upload in the workers."""
CULPRITS = (Write("culprit's refusal", f"{STORE}.refuse_accepted"),)
"""Passed only when an accepted update makes the result of its round invalid."""


def points(*writes: Write) -> dict[str, Write]:
    """The points of these writes by name, such as "before commit"."""
    return {f"{side} {write.name}": write for write in writes for side in write.sides}


class KillPoints:
    """Kills this process at the ordered point; thread-safe."""

    def __init__(self, order: Path) -> None:
        self._order = order
        self._passed: Counter[int] = Counter()
        self._lock = threading.Lock()

    def passes(self, point: str) -> None:
        """Record a pass of this point. Does not return if the order names it."""
        with self._lock:
            try:
                order = json.loads(self._order.read_text())
            except FileNotFoundError:
                return
            if order["point"] != point:
                return
            self._passed[order["id"]] += 1
            if self._passed[order["id"]] == order["nth"]:
                self._order.rename(executed_path(self._order))
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Put the points around all writes."""
        every = (EVERY_ROUND, AT_THE_END, NEW_EPOCH, TOGETHER, CULPRITS, IN_OBJECTS, REMOVALS, PRIVATE, OF_WORKERS)
        for write in itertools.chain.from_iterable(every):
            module, _, path = write.where.partition(":")
            *owners, name = path.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, name, self._around(write, getattr(owner, name)))

    def _around(self, write: Write, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.passes(f"before {write.name}")
            result = function(*args, **kwargs)
            self.passes(f"behind {write.name}")
            return result

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            self.passes(f"before {write.name}")
            result = await function(*args, **kwargs)
            self.passes(f"behind {write.name}")
            return result

        return call_async if inspect.iscoroutinefunction(function) else call


class KillOrders:
    """The harness's side: writes orders and checks whether they were executed."""

    _ids = itertools.count(1)

    def __init__(self, order: Path) -> None:
        self._order = order

    def kill_at(self, point: str, nth: int) -> None:
        """Order the coordinator to die at the nth pass of this point."""
        executed_path(self._order).unlink(missing_ok=True)
        new = self._order.with_suffix(".new")
        new.write_text(json.dumps({"id": next(self._ids), "point": point, "nth": nth}))
        new.rename(self._order)

    def cancel(self) -> None:
        """Remove the order."""
        self._order.unlink(missing_ok=True)

    @property
    def executed(self) -> bool:
        """Whether a process has killed itself at the last ordered point."""
        return executed_path(self._order).exists()


def order_path(config: Path) -> Path:
    """The path at which a coordinator with these settings expects orders."""
    return config.with_suffix(".order")


def executed_path(order: Path) -> Path:
    """The path to which an executed order is renamed."""
    return order.with_suffix(".obeyed")
