"""Gives changed inputs to parsers in this process, and keeps what fails: other exceptions, slow inputs, lost memory."""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import structlog

from tests.fuzz.mutation import input_of, random_for
from tests.fuzz.parser import Parser
from tests.hostile.federation import Memory

SLOW_S = 10.0
"""Processor time of one input above which it counts as a failure. The slowest ones take some hundred milliseconds."""
HANG_S = 120.0
"""Wall time without an end after which the process ends itself with the stacks of all threads."""
BATCH = 32
MOST_GROWTH_MIB = 192.0
"""Growth of this process's memory after the first batches of all parsers; allocators keep some."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One input that failed."""

    parser: str
    number: int
    raw: bytes
    error: str

    @property
    def place(self) -> str:
        """The parser, and the line that raised: inputs with the same one are shown once."""
        return f"{self.parser}: {self.error.strip().splitlines()[-1][:60]}"

    def save(self, folder: Path) -> Path:
        """Write the input to a file; returns its path. `corpus.py` replays it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.parser}--{hashlib.sha256(self.raw).hexdigest()[:12]}.bin"
        path.write_bytes(self.raw)
        return path


@dataclass(slots=True)
class Tally:
    """What was run, and what came of it."""

    inputs: Counter[str] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    growth_mib: float = 0.0

    def add(self, failure: Failure) -> None:
        """Keep a failure, once for each place."""
        if failure.place not in {each.place for each in self.failures}:
            self.failures.append(failure)

    @property
    def total(self) -> int:
        """All inputs."""
        return self.inputs.total()


def run_one(parser: Parser, raw: bytes) -> tuple[str, str]:
    """Give one input to a parser. Returns its result, "accepted" or an error's name, and the failure's text or ""."""
    began = time.process_time()
    try:
        parser.call(raw)
        result = "accepted"
    except parser.refusals as error:
        result = type(error).__name__
    except Exception:  # noqa: BLE001 - this is what the fuzzer is for
        return "failed", traceback.format_exc(limit=-8)
    took = time.process_time() - began
    return result, f"took {took:.1f} s of processor time" if took > SLOW_S else ""


def play(parsers: Sequence[Parser], seed: int, over: Callable[[Tally], bool]) -> Tally:
    """Run batches of parsers, drawn by their weights, until `over` returns True."""
    tally, memory, base = Tally(), Memory.of_this_process(), 0.0
    order, weights = Random(seed), [parser.weight for parser in parsers]
    with quiet() as faults:
        for batches in count():
            if over(tally):
                break
            _batch(order.choices(parsers, weights)[0], seed, tally, faults)
            if batches == 4 * len(parsers):
                base = memory.now()
        tally.growth_mib = memory.now() - base if base else 0.0
    return tally


def _batch(parser: Parser, seed: int, tally: Tally, faults: FaultLog) -> None:
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__ or 2)
    try:
        for _ in range(BATCH):
            number = tally.inputs[parser.name]
            raw = input_of(random_for(seed, parser.name, number), parser.seeds)
            result, error = run_one(parser, raw)
            tally.inputs[parser.name] += 1
            tally.results[f"{parser.name} {result}"] += 1
            logged = faults.taken()
            if error := error or logged:
                tally.add(Failure(parser.name, number, raw, error))
    finally:
        faulthandler.cancel_dump_traceback_later()


FAULTS = frozenset(
    {"rpc_failed", "task_failed", "run_failed", "event_broken", "attendance_broken", "evaluation_failed"}
)
"""Log events of faults, also of work that goes on after its call."""


class FaultLog(logging.Handler):
    """Collects faults that are only logged; all other log lines are dropped."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())

    def event(self, logger: Any, method: str, event: structlog.types.EventDict) -> str:
        """A processor of structlog."""
        if event.get("event") in FAULTS:
            self._found.append(str(event)[:2000])
        raise structlog.DropEvent

    def taken(self) -> str:
        """The faults since the last call."""
        found, self._found = self._found, []
        return "\n".join(found)


@contextmanager
def quiet() -> Iterator[FaultLog]:
    """Log lines are dropped except for faults, and so are the certificate library's warnings about what it reads."""
    before, faults = structlog.get_config(), FaultLog()
    structlog.configure(
        processors=[faults.event], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )  # fmt: skip
    logging.getLogger("asyncio").addHandler(faults)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield faults
    finally:
        logging.getLogger("asyncio").removeHandler(faults)
        structlog.configure(**before)


def named(parsers: Iterable[Parser], name: str) -> Parser:
    """The parser of this name. Raises ValueError if there is none."""
    known = {parser.name: parser for parser in parsers}
    if name not in known:
        raise ValueError(f"expected one of {', '.join(sorted(known))}, got {name!r}")
    return known[name]
