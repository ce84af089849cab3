"""The engine that the user asked for."""

from __future__ import annotations

from dataclasses import dataclass

from fl_ops.simulate.engines.engine import EngineContext, LocalEngine
from fl_ops.simulate.engines.sequential import SequentialEngine
from fl_ops.simulate.engines.workers import WorkersEngine


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the local work of a run is done."""

    workers: int = 1
    """Processes that train clients. 1: this process trains them, one after the other."""


SEQUENTIAL = EngineOptions()


def make_engine(options: EngineOptions, context: EngineContext) -> LocalEngine:
    """The engine. Raises TaskError if the task's model cannot be made."""
    return SequentialEngine(context) if options.workers == 1 else WorkersEngine(context, options.workers)
