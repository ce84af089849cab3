"""Callers with changed requests against a live coordinator, while honest daemons train in it.

What counts as a failure: a status INTERNAL or UNKNOWN, a call without an end, a fault in the coordinator's log, growth
of its memory, its end, or an honest run with other bits than one without the callers.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from fl_ops.errors import OpsError
from tests.fuzz.live.caller import Called, Caller
from tests.fuzz.live.frame_caller import FrameCaller
from tests.fuzz.live.methods import served
from tests.hostile.federation import Federation, Memory
from tests.processes.enrollment import EnrollingCoordinator

T = TypeVar("T")
CALLERS = 4
CALLS_OF_A_SESSION = 200
SETTLED_CALLS = 1000
"""Calls after which the coordinator's memory is first measured."""
SETTINGS: dict[str, Any] = {
    "reflection": True,
    "quarantine": {"after": 0, "failures": 0},
    "transfers": {"calls_per_s": 100_000.0, "calls": 100_000},
}
"""Limits that would refuse the callers before their requests are read are off."""
WEIGHTS = {"Register": 0.2, "CreateRun": 0.5, "BanClient": 0.3, "ForgetClient": 0.3, "DrainClient": 0.3}
"""Of methods after which the caller has less to call; all others have 1, SubmitUpdate 3."""
MOST_GROWTH_MIB = 96.0
"""Of the coordinator's memory, from the first calls to the end."""


@dataclass(slots=True)
class LiveResult:
    """What was called, and what came of it."""

    called: Called = field(default_factory=Called)
    failures: list[str] = field(default_factory=list)
    honest_runs: int = 0
    growth_mib: float = 0.0
    frames: Counter[str] = field(default_factory=Counter)
    """Calls with wrong frames, by the status of their answers."""


def reached(function: Callable[[], T]) -> T:
    """The function's result. It is called again while the operators' port is being served again."""
    for _ in range(20):
        try:
            return function()
        except OpsError:
            time.sleep(0.2)
    return function()


class FuzzedFederation(Federation):
    """With an authority and a port for enrollment."""

    server_class = EnrollingCoordinator


def play(federation: Federation, seed: int, over: Callable[[int, int], bool]) -> LiveResult:
    """Call until `over(calls, failures)` is true, or until the program is interrupted."""
    undisturbed = federation.server.digests(federation.begin_run())
    result, memory, stop = LiveResult(), Memory(federation.server.pid), threading.Event()
    with ExitStack() as callers:
        working = [callers.enter_context(Caller(federation, f"fuzzer-{number}", seed)) for number in range(CALLERS)]
        framer = FrameCaller(federation, seed)
        threads = [threading.Thread(target=_work, args=(caller, seed, stop), daemon=True) for caller in working]
        threads.append(threading.Thread(target=_send_frames, args=(framer, stop), daemon=True))
        for thread in threads:
            thread.start()
        base = 0.0
        try:
            while not over(calls := _calls(working), _failed(working, result)) and federation.server.exit_code is None:
                if not base and calls > SETTLED_CALLS:
                    base = memory.now()
                _honest_run(federation, undisturbed, result)
        except KeyboardInterrupt:
            result.failures.append("interrupted: the counts are those until then")
        finally:
            stop.set()
            for thread in threads:
                thread.join(120.0)
        if any(thread.is_alive() for thread in threads):
            result.failures.append("a caller hangs")
        for caller in working:
            result.called.add(caller.called)
        result.frames = framer.answers
        result.failures += framer.failures
    result.growth_mib = memory.now() - base if base and federation.server.exit_code is None else 0.0
    result.failures += _failures(federation, result)
    return result


def _work(caller: Caller, seed: int, stop: threading.Event) -> None:
    methods = served()
    weights = [3.0 if method.streams_in else WEIGHTS.get(method.name, 1.0) for method in methods]
    random, calls = Random(f"{seed}/{caller.name}"), 0
    while not stop.is_set():
        if calls % CALLS_OF_A_SESSION == 0:
            with suppress(OpsError):  # the port is being served again: the caller keeps what it has
                caller.prepare()
        calls += 1
        caller.call(random.choices(methods, weights)[0])


def _send_frames(framer: FrameCaller, stop: threading.Event) -> None:
    while not stop.is_set():
        framer.call()


def _calls(callers: Sequence[Caller]) -> int:
    return sum(caller.called.calls.total() for caller in callers)


def _failed(callers: Sequence[Caller], result: LiveResult) -> int:
    return len(result.failures) + sum(len(caller.called.failures) for caller in callers)


def _honest_run(federation: Federation, undisturbed: list[str], result: LiveResult) -> None:
    run_id = reached(federation.begin_run)
    digests = reached(lambda: federation.server.digests(run_id))
    result.honest_runs += 1
    if digests != undisturbed:
        result.failures.append(f"an honest run has other bits: {digests}, expected {undisturbed}")
    time.sleep(0.2)


def _failures(federation: Federation, result: LiveResult) -> list[str]:
    server, found = federation.server, []
    kinds: dict[tuple[str, str, str], Any] = {}
    for each in result.called.failures:
        kinds.setdefault((each.method, each.code, each.details[:60]), each)
    found += [f"{method}: {code} {each.details!r} for {each.raw!r:.300}" for (method, code, _), each in kinds.items()]
    if server.exit_code is not None:
        found.append(f"the coordinator ended with {server.exit_code}")
    found += [f"{event['event']}: {event.get('error')}" for name in FAULTS for event in server.events(name)[:5]]
    if errors := _own_errors(server._err.read_bytes().decode(errors="replace")):
        found.append(f"on stderr: {errors[-2000:]}")
    if result.growth_mib > MOST_GROWTH_MIB:
        found.append(f"the coordinator's memory grew by {result.growth_mib:.0f} MiB")
    return found


def _own_errors(text: str) -> str:
    """Tracebacks and warnings of Python on stderr; the transport's lines quote what peers send."""
    own = _TRANSPORT_NOTE.sub("", text)
    return own if "Traceback (most recent call last)" in own or re.search(r"\.py:\d+: \w*Warning: ", own) else ""


_TRANSPORT_NOTE = re.compile(
    r"Task exception was never retrieved\n(?:(?!Task exception).)*?_server_main_loop\nUnicodeDecodeError[^\n]*\n",
    re.DOTALL,
)
"""asyncio's note of the accept loop that a path without UTF-8 has ended; `LastingServer` serves the port again."""
FAULTS = ("rpc_failed", "task_failed", "run_failed")
"""Log lines of faults."""
