"""One life: a coordinator and its daemons from the creation of a run to its end, among the faults of a plan."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from fl_server.errors import InvalidInput, ServerError
from fl_server.run.run import Run
from fl_server.run_spec import from_values
from fl_server.store.errors import StoreError
from tests.deterministic import clocks, coordinator, daemon
from tests.deterministic.checks import check, files_left
from tests.deterministic.coordinator import TASK, CoordinatorProcess
from tests.deterministic.effects import Directive, Effects, installed
from tests.deterministic.loop import CURRENT, Killed, Process, StuckLoop, virtual_loop
from tests.deterministic.network import Network, Server, Trouble
from tests.deterministic.plan import HEAL_S, SERVER, Fault, Plan

EPOCH = 1_700_000_000.0
RUN = "r"
WITHIN_S = 900.0
"""A run completes within this virtual time after the last fault."""
CLEAN_S = 900.0
"""No file of the run is left this long after its end and a registration of each device."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
_FOLDERS = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
_FAULTS_LOGGED = frozenset(
    {"rpc_failed", "run_failed", "work_broken", "attendance_broken", "event_broken", "change_broken",
     "state_dir_check_broken", "end_incomplete"}
)  # fmt: skip
"""Lines of the log that only a fault of the product writes."""


class Violated(AssertionError):
    """An invariant does not hold."""


@dataclass
class Seen:
    """What a life has shown, for the checks at its end."""

    acknowledged: dict[tuple[str, int, int], list[bytes]] = field(default_factory=dict)
    """(client, round, exchange) -> digests of the updates with an admitted receipt, in order."""
    fixed: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(round, exchange) -> accepted list, as it was written last."""
    commits: dict[int, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    kills: int = 0
    restarts: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    """The log, if it is kept."""


class Life:
    """The processes of one life and what happens to them."""

    def __init__(self, plan: Plan, folder: Path, loop: Any) -> None:
        self.plan, self.folder, self.loop = plan, folder, loop
        self.seen = Seen()
        self.network = Network(plan.seed)
        self.network.trouble, self.network.lies, self.network.answered = self._trouble, self._lie, self._answered
        self.effects = Effects(self._watch)
        self.config = coordinator.settings(folder / SERVER)
        self.model = "plain"
        self.processes: dict[str, Process] = {}
        self.server: CoordinatorProcess | None = None
        self.epochs = dict.fromkeys((SERVER, *plan.clients), EPOCH)
        self.down_s: dict[str, float] = {}
        self.over = False
        self.created = False
        self._left = {id(fault): fault.number for fault in plan.faults}
        self._used: set[int] = set()
        self._ends: dict[int, float] = {}
        self.graveyard: list[Any] = []

    # Faults at effects and calls.

    def _watch(self, process: Process, name: str) -> Directive:
        now, who = self.loop.time(), process.name
        self.seen.effects[f"{'server' if who == SERVER else 'client'} {name}"] += 1
        for fault in self.plan.faults:
            if fault.who != who or now < fault.at or id(fault) in self._used:
                continue
            if fault.kind in ("full", "away"):
                if (fault.kind == "away") != name.startswith("ledger"):
                    continue
                ends = self._ends.get(id(fault))
                if ends is None:
                    if not self._due(fault):
                        continue
                    ends = self._ends[id(fault)] = now + fault.seconds
                    self._happened(fault)
                if now < ends:
                    return "full" if fault.kind == "full" else "away"
                self._used.add(id(fault))
            if fault.kind == "kill" and fault.name in ("", name) and self._due(fault):
                self._used.add(id(fault))
                self._happened(fault)
                self.down_s[who] = fault.seconds
                return fault.how  # type: ignore[return-value]
        return ""

    def _due(self, fault: Fault) -> bool:
        self._left[id(fault)] -= 1
        return self._left[id(fault)] < 0

    def _happened(self, fault: Fault) -> None:
        self.seen.happened[fault.kind] += 1
        self.note(f"fault {fault}")

    def note(self, text: str) -> None:
        """A line of the life's own log."""
        self.seen.lines.append(f"{self.loop.time():9.3f} {text}")

    def _trouble(self, client: str, method: str, number: int) -> Trouble | None:
        for fault in self.plan.faults:
            if fault.kind == "call" and (fault.who, fault.name, fault.number) == (client, method, number):
                self._happened(fault)
                match fault.how:
                    case "lost":
                        return Trouble(loses_request=True)
                    case "unanswered":
                        return Trouble(loses_answer=True)
                    case "repeated":
                        return Trouble(repeats_after_s=fault.seconds)
                    case "late":
                        return Trouble(late_s=fault.seconds)
                    case "cut":
                        return Trouble(cuts_after=1 + number % 3)
        return None

    def _lie(self, client: str, number: int) -> str:
        for fault in self.plan.faults:
            if fault.kind == "lie" and (fault.who, fault.number) == (client, number):
                self._happened(fault)
                return fault.how
        return ""

    def _answered(self, client: str, response: Any) -> None:
        receipt = getattr(response, "receipt", None)
        if receipt is not None and receipt.admitted and receipt.HasField("key"):
            key = (client, receipt.key.round, receipt.key.exchange)
            digest = receipt.digest.value
            self.seen.acknowledged.setdefault(key, []).append(digest)

    def _committed(self, round_: int, digest: str) -> None:
        """A round is in the ledger."""
        known = self.seen.commits.setdefault(round_, digest)
        if known != digest:
            self.seen.violations.append(f"round {round_} was committed with {known}, and again with {digest}")

    # Processes.

    async def _run_coordinator(self) -> None:
        """Start the coordinator again and again."""
        while not self.over:
            process, died = self._process(SERVER)
            task = process.spawn(self._serve(process))
            waiting = asyncio.ensure_future(died.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and process.alive:
                error = task.exception()
                if error is not None and not isinstance(error, StoreError | OSError):
                    self.seen.violations.append(f"the coordinator's start failed: {error!r}")
                    self.over = True
                    return
                if error is not None:  # a disk that is full: the supervisor of the process tries again
                    self.note(f"start failed: {error!r}")
                    process.kill()
                    self.down_s[SERVER] = 2.0
            await waiting
            self.server = None
            self.seen.kills += 1
            self.graveyard.append(process)
            await asyncio.sleep(self.down_s.pop(SERVER, 1.0))
            self.seen.restarts += 1

    async def _serve(self, process: Process) -> None:
        started = CoordinatorProcess(self.config, process, self.effects, self._committed)
        handlers = await started.start()
        self.network.server = Server(process, handlers)
        self.server = started
        self.note("the coordinator serves")

    async def _run_client(self, name: str) -> None:
        """Start a daemon again and again."""
        config = daemon.settings(name, self.folder / name, self.model)
        while not self.over:
            process, died = self._process(name)
            task = process.spawn(daemon.run_daemon(config, self.model, self.network))
            waiting = asyncio.ensure_future(died.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and process.alive:
                error = task.exception()
                self.note(f"{name} ended: {error!r}")
                if not isinstance(error, OSError) and type(error).__name__ != "StateError":
                    self.seen.violations.append(f"the daemon {name} ended: {error!r}")
                process.kill()
                self.down_s[name] = 2.0
            await waiting
            self.graveyard.append(process)
            await asyncio.sleep(self.down_s.pop(name, 1.0))

    def _process(self, name: str) -> tuple[Process, asyncio.Event]:
        process, died = Process(name, self.epochs[name]), asyncio.Event()
        self.processes[name] = process
        process.on_kill.append(died.set)
        process.on_kill.append(lambda: self.note(f"{name} is killed"))
        return process, died

    def _kill(self, name: str, seconds: float) -> None:
        process = self.processes.get(name)
        if process is not None and process.alive:
            self.down_s[name] = seconds
            process.kill()

    # Faults at times.

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(max(0.0, fault.at - self.loop.time()))
        self._happened(fault)
        match fault.kind:
            case "block":
                self.network.block(fault.who, fault.seconds)
            case "clock":
                self.epochs[fault.who] += fault.seconds
                if fault.who in self.processes:
                    self.processes[fault.who].epoch += fault.seconds
            case "wipe":
                self._kill(fault.who, fault.seconds)
                shutil.rmtree(self.folder / fault.who, ignore_errors=True)
            case "term":
                await self._terminate(fault.seconds)
            case "operator":
                await self._operate(fault)

    async def _terminate(self, seconds: float) -> None:
        process, server = self.processes.get(SERVER), self.server
        if process is None or server is None or not process.alive:
            return
        stopping = process.spawn(server.stop())
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.wait({stopping})
        self._kill(SERVER, seconds)

    async def _operate(self, fault: Fault) -> None:
        if fault.how == "pause":
            if await self._act("pause"):
                await asyncio.sleep(fault.seconds)
            await self._act("resume")
        else:
            await self._act(fault.how, fault.who)

    async def _act(self, what: str, client: str = "") -> bool:
        """An operator's call. Returns whether it was done."""

        async def act(server: CoordinatorProcess) -> None:
            actions, run = server.coordinator.actions, server.coordinator.run(RUN)
            match what:
                case "pause":
                    await actions.pause(run, "admin")
                case "resume":
                    await actions.resume(run, "admin")
                case "extend":
                    await actions.extend(run, 1, 0.0, "admin")
                case "stop":
                    await actions.stop(run, "enough", "admin")
                case "ban":
                    await server.operators.ban(client, "admin", "a test")
                case "unban":
                    await server.operators.unban(client, "admin")

        return await self._as_operator(act)

    async def _as_operator(self, act: Callable[[CoordinatorProcess], Any]) -> bool:
        for _ in range(60):
            process, server = self.processes.get(SERVER), self.server
            if process is not None and server is not None and process.alive:
                died = asyncio.Event()
                process.on_kill.append(died.set)
                task = process.spawn(act(server))
                waiting = asyncio.ensure_future(died.wait())
                await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if task.done() and task.cancelled():
                    return False
                if task.done():
                    error = task.exception()
                    if error is None:
                        return True
                    if isinstance(error, InvalidInput):
                        raise Violated(f"an operator's call was refused: {error}")
                    if isinstance(error, ServerError):
                        self.note(f"operator: {error!r}")
                        return False
                    if not isinstance(error, StoreError):
                        self.seen.violations.append(f"an operator's call failed: {error!r}")
                        return False
            await asyncio.sleep(1.0)
        return False

    # The run.

    async def _create(self) -> None:
        """Create the run, as an operator who tries until it exists."""
        values = dict(self.plan.job.sections)
        values["task"] = {"name": TASK, "options": {"model": self.model, "kept": 4}}
        values["round"] = {**values["round"], "min_clients": len(self.plan.clients)}

        async def create(server: CoordinatorProcess) -> None:
            if RUN not in server.coordinator.table.loaded:
                await server.coordinator.creation.create(from_values(values), "admin")

        while not await self._as_operator(create):
            await asyncio.sleep(1.0)

    def run(self) -> Run | None:
        """The run, if the coordinator is up and has it."""
        server = self.server
        return server.coordinator.table.loaded.get(RUN) if server is not None else None

    async def live(self) -> None:
        """From the first start to the end of the run."""
        working = [asyncio.ensure_future(self._run_coordinator())]
        working += [asyncio.ensure_future(self._run_client(name)) for name in self.plan.clients]
        working += [
            asyncio.ensure_future(self._strike(fault))
            for fault in self.plan.faults
            if fault.kind in ("block", "clock", "wipe", "term", "operator")
        ]
        try:
            await self._create()
            self.note("the run is created")
            await self._until_ended(working)
            await asyncio.sleep(60.0)
            for _ in range(int(CLEAN_S)):
                if not files_left(self):
                    break
                await asyncio.sleep(1.0)
        finally:
            self.over = True
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    async def _until_ended(self, working: Sequence[asyncio.Future[None]]) -> None:
        heal = HEAL_S if self.plan.faults else 0.0
        while True:
            run = self.run()
            for task in working:
                if task.done():
                    task.result()
            if self.seen.violations:
                return
            over = run is not None and run.ended and run.record.ended_at and run.status != "failed"
            if over and (self.loop.time() > heal or not self.plan.faults):
                return
            if run is not None and run.status == "failed":
                raise Violated(f"the run failed: {run.state.ending}")
            if self.loop.time() > heal + WITHIN_S:
                raise Violated(f"the run has not ended {WITHIN_S:g} s after the faults: {self._describe()}")
            await asyncio.sleep(0.5)
            if self.plan.faults and self.loop.time() > heal > self.loop.time() - 0.6:
                await self._repair()

    async def _repair(self) -> None:
        """What an operator repairs when all faults are over."""
        for fault in self.plan.faults:
            if fault.kind == "operator" and fault.how == "ban":
                await self._act("unban", fault.who)
        run = self.run()
        if run is not None and run.status == "paused":
            await self._act("resume")

    def loop_errors(self) -> list[str]:
        """Exceptions that reached the event loop, apart from those of dead processes."""
        errors = [(each.get("message"), each.get("exception")) for each in self.loop.errors]
        return [f"{message}: {error!r}" for message, error in errors if not isinstance(error, Killed)]

    def _describe(self) -> str:
        run = self.run()
        if run is None:
            return "the coordinator is not up"
        state = run.state
        return (
            f"{run.status}, {state.phase.value}, round {state.round}.{state.attempt}, eligible {state.eligible}, drawn"
            f" {sorted(state.drawn)}, out {sorted(state.out)}, waiting: {run.run_status.waiting_reason}"
        )


@dataclass
class Result:
    """What became of a life."""

    plan: Plan
    seen: Seen
    error: str = ""
    trace: str = ""


def live(plan: Plan) -> Result:
    """Live the life of a plan, and check it."""
    clocks.require_first()
    torch.set_num_threads(1)
    hook, before = sys.unraisablehook, structlog.get_config()
    sys.unraisablehook = lambda _: None  # of coroutines of dead processes, which are collected half way
    gc.disable()
    try:
        return _live(plan)
    finally:
        structlog.configure(processors=[_dropped], cache_logger_on_first_use=False)
        if not gc.get_freeze_count():  # of the program itself, which need not be searched after each life
            gc.collect()
            gc.freeze()
        gc.collect()
        gc.enable()
        structlog.configure(**before)
        sys.unraisablehook = hook


def _live(plan: Plan) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="life-", dir=_FOLDERS))
    try:
        with virtual_loop(plan.seed) as loop:
            life, error = Life(plan, folder, loop), ""
            structlog.configure(processors=[partial(_keep, life)], cache_logger_on_first_use=False)
            with installed(life.effects, loop, plan.seed):
                try:
                    loop.run_until_complete(life.live())
                    error = "; ".join(life.seen.violations)
                    if not error:
                        check(life)
                except (AssertionError, StuckLoop) as failure:
                    error = "; ".join((*life.seen.violations, str(failure)))
                _bury(life)
            return Result(plan, life.seen, error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bury(life: Life) -> None:
    """Close what the processes have open."""
    for process in (*life.processes.values(), *life.graveyard):
        process.kill()


def _dropped(*_: Any) -> Any:
    raise structlog.DropEvent


def _keep(life: Life, _: Any, level: str, fields: Any) -> Any:
    """Keep a line of the log. Those that only a fault of the product writes are violations."""
    process = CURRENT.get()
    if process is not None and not process.alive:
        raise structlog.DropEvent
    name, who = fields.get("event"), process.name if process else "-"
    info = fields.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info
    where = "".join(traceback.format_exception(error)[-4:]) if isinstance(error, BaseException) else ""
    if name in _FAULTS_LOGGED and not isinstance(error, Killed):
        life.seen.violations.append(f"the log of {who} has {fields} {where}")
    life.note(f"{who} {level} {fields} {where}")
    raise structlog.DropEvent


def without(plan: Plan, fault: Fault) -> Plan:
    """The plan without one of its faults."""
    return replace(plan, faults=tuple(each for each in plan.faults if each is not fault))
