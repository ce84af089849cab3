"""The engine that the user asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

import torch

from algorithms.batched.strategies import Name
from fl_ops.errors import UsageError
from fl_ops.simulate.engines.batched import BatchedEngine, BatchedOptions, LockstepPrecision
from fl_ops.simulate.engines.client_work import CPU, SequentialEngine
from fl_ops.simulate.engines.engine import EngineContext, LocalEngine
from fl_ops.simulate.engines.workers import WorkersEngine
from fl_ops.simulate.ranks.distributed import DistributedEngine
from fl_ops.simulate.ranks.group import Ranks


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the local work of a run is done."""

    workers: int = 1
    """Processes that train clients. 1: this process trains them, one after the other."""
    batched: BatchedOptions | None = None
    """This process trains many clients in lockstep. Not with several workers."""
    ranks: Ranks | None = None
    """The processes that share the clients; each does its share in this way. None: this process has no others."""

    @property
    def device(self) -> torch.device:
        """Where the server's model is evaluated: on the device that clients train on."""
        return CPU if self.batched is None else self.batched.device

    @property
    def arithmetic(self) -> dict[str, str | int | None]:
        """What decides the bits of updates, as JSON values: a run continues only with the same.

        The bits of the engines for one client at a time are the same for any number of workers and ranks. In lockstep
        each rank makes groups of its own share, so the number of ranks changes the bits.
        """
        if self.batched is None:
            return {"clients": "one at a time"}
        batched = self.batched
        return {
            "clients": "in lockstep",
            **_kind(batched.device),
            "strategy": batched.strategy,
            "group": batched.group,
            "precision": batched.precision,
            **({"ranks": self.ranks.size} if self.ranks else {}),
        }


SEQUENTIAL = EngineOptions()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The options of `fl simulate` that choose an engine. None: not given."""

    engine: Literal["workers", "sequential", "batched"] | None = None
    workers: int | None = None
    device: str | None = None
    strategy: Name | None = None
    group: int | None = None
    precision: LockstepPrecision | None = None

    def options(self, runs: int = 1, *, replays: bool = False) -> EngineOptions:
        """The engine of each of so many parallel runs. Raises UsageError for options that do not go together.

        replays: the run is compared with a ledger bit by bit.
        """
        engine = self.engine or ("batched" if self.device not in (None, "cpu") else "workers")
        if engine == "batched":
            return self._batched(replays=replays)
        given = {
            "--device": self.device,
            "--strategy": self.strategy,
            "--group": self.group,
            "--precision": self.precision,
        }
        if found := [option for option, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(found)}: expected --engine batched, which has this option")
        if engine == "sequential":
            if self.workers not in (None, 1):
                raise UsageError(f"--workers {self.workers}: expected --engine workers, got sequential")
            return SEQUENTIAL
        return EngineOptions(self.workers or max(1, len(os.sched_getaffinity(0)) // runs))

    def _batched(self, *, replays: bool) -> EngineOptions:
        if replays:
            raise UsageError("--replay: expected --engine workers or sequential, whose bits are those of a coordinator")
        if self.workers not in (None, 1):
            raise UsageError(f"--workers {self.workers}: the engine batched trains in one process; leave out --workers")
        device = _device(self.device or "cpu")
        if self.precision == "tf32" and device.type != "cuda":
            raise UsageError(f"--precision tf32: expected --device cuda, got {device}")
        return EngineOptions(
            batched=BatchedOptions(device, self.strategy, self.group or 0, self.precision or "float32")
        )


def _kind(device: torch.device) -> dict[str, str]:
    """A device without its number: GPUs of one model have the same bits."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"device": device.type, **gpu}


def _device(text: str) -> torch.device:
    """A device of this machine. Raises UsageError."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"--device: expected cpu, cuda or cuda:N, got {text!r}") from None
    if device.type not in {"cpu", "cuda"}:
        raise UsageError(f"--device: expected cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cpu":
        return device
    # Ranks of one machine take its devices in order; torchrun numbers them.
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UsageError(f"--device {text}: expected device {index}, torch finds {torch.cuda.device_count()} here")
    return torch.device("cuda", index)


def make_engine(options: EngineOptions, context: EngineContext) -> LocalEngine:
    """The engine. Raises TaskError if the task's model cannot be made."""
    engine: LocalEngine
    if options.batched is not None:
        # Ranks send updates as files.
        alone = options.batched if options.ranks is None else replace(options.batched, holds_updates=False)
        engine = BatchedEngine(context, alone)
    else:
        engine = SequentialEngine(context) if options.workers == 1 else WorkersEngine(context, options.workers)
    if options.ranks is not None and options.ranks.rank == 0:
        return DistributedEngine(context, engine, options.ranks)
    return engine
