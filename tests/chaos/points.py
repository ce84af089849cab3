"""Where the coordinator can be made to die: before, inside and behind every durable write of a round.

The coordinator itself has no hook for this. `python -m tests.chaos.server` replaces the functions named here by ones
that look for an order first, and again behind: a file `{"id": 3, "point": "before commit", "nth": 1}` beside the
settings. At the nth pass of that point the process renames the order, as proof, and kills itself with SIGKILL.
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
    """module:function or module:class.method that does it."""
    times: int = 1
    """How often every round at least comes by."""
    sides: tuple[str, ...] = ("before", "behind")


STORE, CHECKPOINTS = "fl_server.store.sql:SqlStore", "fl_server.store.checkpoints"
SPOOL, PARTS = "fl_server.spool:Spool", "fl_server.spool_parts"

EVERY_ROUND = (
    Write("attempt", f"{STORE}.open_attempt"),
    Write("part file", f"{SPOOL}.open_part", 3),
    Write("chunk", f"{PARTS}:PartFile.write", 12),
    # Its checksum is taken when the bytes are written and their note is not.
    Write("chunk's note", f"{PARTS}:crc32c", 12, ("before",)),
    Write("seal", f"{PARTS}:PartFile.seal", 3),
    Write("ledger line", f"{STORE}.record_update", 3),
    Write("accepted list", f"{STORE}.fix_accepted"),
    Write("checkpoint", f"{CHECKPOINTS}:Checkpoints.save"),
    # The files are whole under a temporary name, and get their own.
    Write("checkpoint's rename", f"{CHECKPOINTS}:_put_in_place"),
    Write("commit", f"{STORE}.commit"),
    Write("outcomes", "fl_server.round_work:tell_outcomes"),
    Write("spool's removal", f"{SPOOL}.remove_round"),
    Write("old checkpoint's removal", f"{CHECKPOINTS}:Checkpoints.prune"),
    Write("metrics", f"{STORE}.set_metrics"),
)
AT_THE_END = (Write("run's end", f"{STORE}.update_run"), Write("run's spool", f"{SPOOL}.remove_run"))
"""Every run comes by once at least, when it ends."""
NEW_EPOCH = (Write("new epoch", f"{STORE}.restart_round"),)
"""Only where client states are lost."""

CULPRITS = (Write("culprit's refusal", f"{STORE}.refuse_accepted"),)
"""Only where an accepted update spoils what its round comes to."""


def points(*writes: Write) -> dict[str, Write]:
    """Each side of these writes by its name, such as "before commit"."""
    return {f"{side} {write.name}": write for write in writes for side in write.sides}


class Deaths:
    """Kills this process where it was ordered to; thread-safe."""

    def __init__(self, order: Path) -> None:
        self._order = order
        self._passed: Counter[int] = Counter()
        self._lock = threading.Lock()

    def passes(self, point: str) -> None:
        """The process is at this point now. Does not return if it is to die here."""
        with self._lock:
            try:
                order = json.loads(self._order.read_text())
            except FileNotFoundError:
                return
            if order["point"] != point:
                return
            self._passed[order["id"]] += 1
            if self._passed[order["id"]] == order["nth"]:
                self._order.rename(proof(self._order))
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Put the points around all writes."""
        for write in (*EVERY_ROUND, *AT_THE_END, *NEW_EPOCH, *CULPRITS):
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


class Orders:
    """The harness's side: orders a death, and knows whether it came."""

    _ids = itertools.count(1)

    def __init__(self, order: Path) -> None:
        self._order = order

    def die(self, point: str, nth: int) -> None:
        """From now on the nth pass of this point is the last."""
        proof(self._order).unlink(missing_ok=True)
        beside = self._order.with_suffix(".new")
        beside.write_text(json.dumps({"id": next(self._ids), "point": point, "nth": nth}))
        beside.rename(self._order)

    def withdraw(self) -> None:
        """Nobody dies any more."""
        self._order.unlink(missing_ok=True)

    @property
    def obeyed(self) -> bool:
        """Whether a process has killed itself at the point that was ordered last."""
        return proof(self._order).exists()


def order_beside(config: Path) -> Path:
    """Where a coordinator with these settings looks for orders."""
    return config.with_suffix(".order")


def proof(order: Path) -> Path:
    """What an order becomes when it is obeyed."""
    return order.with_suffix(".obeyed")
