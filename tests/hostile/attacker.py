"""An attack in a process of its own."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from fl_ops.worker_process import end_with_parent
from tests.hostile.target import Target
from tests.processes.forks import context
from tests.processes.process import TIMEOUT_S

LOWEST_PRIORITY = 19
ENDING_S = 30.0
"""Time for an attack to close its connections."""


class Attacker:
    """A process that attacks with the lowest priority until `end`, or until this process ends.

    It is forked from a process that has imported everything. With the lowest priority on busy processors, the imports
    could take longer than the attack.
    """

    def __init__(self, name: str, at: Target, out: Path) -> None:
        """name: a module of `tests/hostile/attacks`; out: a file for its output. Returns once it attacks."""
        self._out = out
        self._order, order = multiprocessing.Pipe()
        self._process = context().Process(target=_attack, args=(name, at, out, order), daemon=True)
        self._process.start()
        order.close()
        if not self._order.poll(TIMEOUT_S):
            self._process.kill()
            raise TimeoutError(f"the attack {name} did not begin")

    def ask_to_end(self) -> None:
        """The attack is over; the process closes its connections and ends."""
        self._order.close()

    def failure(self) -> str:
        """After `ask_to_end`: wait for its end. Returns why it proves nothing; empty if it attacked and ended."""
        self._process.join(ENDING_S)
        if self._process.exitcode is None:
            self._process.kill()
            return "it did not end"
        return self._out.read_text(errors="replace")[-500:] if self._process.exitcode else ""


def _attack(name: str, at: Target, out: Path, order: Connection) -> None:
    end_with_parent()
    with out.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    module = importlib.import_module(f"tests.hostile.attacks.{name}")
    order.send(None)
    os.nice(LOWEST_PRIORITY)
    module.attack(at, lambda: _is_over(order))


def _is_over(order: Connection) -> bool:
    """Whether the other end is closed; nothing is ever sent to this one."""
    with suppress(OSError):
        return order.poll()
    return True
