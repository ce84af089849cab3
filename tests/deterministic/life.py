"""One life: a coordinator and its daemons from the creation of a run to its end, among the faults of a plan."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from fl_server.run.run import Run
from fl_server.run_settings.spec import from_values
from fl_server.store.errors import StoreError
from protos.fl.v1.coordinator_pb2 import AttendResponse
from tests.deterministic import coordinator, daemon, operators
from tests.deterministic.checks import files_left
from tests.deterministic.coordinator import TASK, CoordinatorProcess
from tests.deterministic.effects import Effects
from tests.deterministic.loop import Killed, Process
from tests.deterministic.network import Network, Server
from tests.deterministic.objects import LOCAL, ObjectStore
from tests.deterministic.operators import RUN
from tests.deterministic.plan import HEAL_S, LONGEST_S, SERVER, Fault, Plan
from tests.deterministic.private_records import PrivateRecords, limit, policy_of
from tests.deterministic.private_rounds import PrivateRounds
from tests.deterministic.promises import Promises
from tests.deterministic.seen import Seen, Violated
from tests.deterministic.striking import Faults
from tests.deterministic.uptime import Uptime

EPOCH = 1_700_000_000.0
WITHIN_S = 900.0
"""A run completes within this virtual time after the last fault."""
_LOOK_S, _LOOK_DOWN_S = 0.5, 5.0
"""Between two looks at the run; the second while no coordinator runs that could have it."""
CLEAN_S = 900.0
"""No file of the run is left this long after its end and a registration of each device."""


class Life:
    """The processes of one life and what happens to them."""

    def __init__(self, plan: Plan, folder: Path, loop: Any) -> None:
        self.plan, self.folder, self.loop = plan, folder, loop
        self.seen = Seen()
        self.network = Network(plan.seed)
        self.faults = Faults(plan, loop, self.seen)
        self.network.trouble, self.network.lies = self.faults.trouble, self.faults.lie
        self.network.answered = self._answered
        self.effects = Effects(self.faults.watch)
        if plan.objects:
            self.effects.objects = ObjectStore(folder / SERVER / "ledger.sqlite", self.seen)
        self.private = PrivateRounds(self.seen.violations)
        self.config = coordinator.settings(folder / SERVER)
        self.model = "plain"
        self.processes: dict[str, Process] = {}
        self.server: CoordinatorProcess | None = None
        self.epochs = dict.fromkeys((SERVER, *plan.clients), EPOCH)
        self.down_s = self.faults.down_s
        self.uptime = Uptime(loop, self.seen, plan.job.sections["round"]["deadline_s"], plan.job.stage_s)
        self.promises = Promises(self.seen, self.network.lied)
        self.records = PrivateRecords(self.seen.violations, folder, limit(daemon.CLIENTS), self.network.lied)
        self.network.sends, self.network.pushed = self._sent, self._pushed
        self.healed_at = HEAL_S if plan.faults else 0.0
        """Virtual time after which there are no faults any more."""
        self.over = False
        self.graveyard: list[Any] = []

    def note(self, text: str) -> None:
        """A line of the life's own log."""
        # The folder's name is another one each time.
        self.seen.note(self.loop.time(), text.replace(f"{self.folder}/", ""))

    def _sent(self, client: str, method: str, message: bytes) -> None:
        self.promises.sends(client, method, message)
        if self.plan.job.unit == "record":
            self.records.sends(client, method, message)

    def _pushed(self, client: str, response: Any) -> None:
        self.promises.pushed(client, response)
        if isinstance(response, AttendResponse) and response.HasField("assignment"):
            assignment = response.assignment
            self.promises.assigned(self.config.state_dir, client, assignment)
            if self.plan.job.unit == "client":
                self.private.assigned(self.config.state_dir, assignment.key.round, assignment.attempt)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch what the life's processes do with privacy."""
        with self.private.watched(), self.records.watched() if self.plan.job.unit == "record" else nullcontext():
            yield

    def _answered(self, client: str, response: Any) -> None:
        receipt = getattr(response, "receipt", None)
        if receipt is not None and receipt.HasField("key"):
            key = (client, receipt.key.round, receipt.key.exchange)
            answers = self.seen.acknowledged if receipt.admitted else self.seen.refused
            answers.setdefault(key, []).append(receipt.digest.value)
            # What a masked update contains is seen in the sum alone.
            if receipt.admitted and receipt.digest.value in self.network.lied and not self.plan.job.stage_s:
                self.seen.violations.append(f"no update of a liar is admitted: {client}, round {receipt.key.round}")

    def _committed(self, round_: int, digest: str) -> None:
        """A round is in the ledger."""
        known = self.seen.commits.setdefault(round_, digest)
        if known != digest:
            self.seen.violations.append(f"a round has one model: round {round_} has {known} and {digest}")

    # Processes.

    async def _run_coordinator(self) -> None:
        """Start the coordinator again and again."""
        while not self.over:
            process, died = self._process(SERVER)
            self.uptime.begins(process)
            task = process.spawn(self._serve(process))
            waiting = asyncio.ensure_future(died.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and process.alive:
                error = task.exception()
                if error is not None and not isinstance(error, StoreError | OSError):
                    self.seen.violations.append(f"a coordinator can always start: {error!r}")
                    self.over = True
                    return
                if error is not None:  # a disk that is full: the supervisor of the process tries again
                    self.note(f"start failed: {error!r}")
                    process.kill()
                    self.down_s[SERVER] = 2.0
            await waiting
            self.server = None
            self.graveyard.append(process)
            down_s = self.down_s.pop(SERVER, 1.0)
            if down_s > LONGEST_S:
                self.healed_at = max(self.healed_at, self.loop.time() + down_s)
            await asyncio.sleep(down_s)
            self.seen.restarts += 1

    async def _serve(self, process: Process) -> None:
        started = CoordinatorProcess(self.config, process, self.effects, self._committed)
        handlers = await started.start()
        self.network.server = Server(process, handlers)
        self.server = started
        self.note("the coordinator serves")

    async def _run_client(self, name: str) -> None:
        """Start a daemon again and again."""
        private = self.plan.job.unit == "record"
        policy = policy_of(name, daemon.CLIENTS, self.folder) if private else None
        config = daemon.settings(name, self.folder / name, self.model, policy)
        while not self.over:
            process, died = self._process(name)
            task = process.spawn(daemon.run_daemon(config, self.model, self.network, private=private))
            waiting = asyncio.ensure_future(died.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and process.alive:
                error = task.exception()
                self.note(f"{name} ended: {error!r}")
                if not isinstance(error, OSError) and type(error).__name__ != "StateError":
                    self.seen.violations.append(f"a daemon never ends by itself: {name}, {error!r}")
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
        self.faults.happened(fault)
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
                self.promises.forgets(fault.who)
                self.records.forgets(fault.who)
            case "disk":
                self._kill(SERVER, fault.seconds)
                for name in LOCAL:
                    shutil.rmtree(self.folder / SERVER / name, ignore_errors=True)
            case "slow":
                await self._slow_store(fault.seconds)
            case "term":
                await self._terminate(fault.seconds)
            case "operator":
                await operators.operate(self, fault)

    async def _slow_store(self, seconds: float) -> None:
        """Let what uses the object store take seconds, in the process that runs now."""
        if (server := self.server) is None:
            return
        pool: Any = server.services.io
        before, pool.busy_s = pool.busy_s, (0.5, 4.0)
        await asyncio.sleep(seconds)
        pool.busy_s = before

    async def _terminate(self, seconds: float) -> None:
        process, server = self.processes.get(SERVER), self.server
        if process is None or server is None or not process.alive:
            return
        stopping = process.spawn(server.stop())
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.wait({stopping})
        self._kill(SERVER, seconds)

    # The run.

    async def _create(self) -> None:
        """Create the run, as an operator who tries until it exists."""
        values = dict(self.plan.job.sections)
        values["task"] = {"name": TASK, "options": {"model": self.model, "kept": 4}}
        wanted = len(self.plan.clients)
        if self.plan.job.unit == "record":  # the client whose site has a limit leaves the run
            wanted = max(values["round"]["clients_per_round"], wanted - 1)
        values["round"] = {**values["round"], "min_clients": wanted}

        async def create(server: CoordinatorProcess) -> None:
            if RUN not in server.coordinator.table.loaded:
                await server.coordinator.creation.create(from_values(values), "admin")

        while not await operators.as_operator(self, create):
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
            if fault.kind in ("block", "clock", "wipe", "term", "operator", "disk", "slow")
        ]
        try:
            await self._create()
            self.note("the run is created")
            await self._until_ended(working)
            await asyncio.sleep(60.0)
            self._register_again()
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
        repaired_at = 0.0
        while True:
            run, now = self.run(), self.loop.time()
            for task in working:
                if task.done():
                    task.result()
            if self.seen.violations:
                return
            if run is not None and not run.ended:
                self.seen.had_run.add(self.processes[SERVER])
            if run is not None and run.status == "failed" and not self._only_liars(run):
                raise Violated(f"no run fails without a cause: {run.state.ending}")
            over = run is not None and run.ended and run.record.ended_at
            if over and (now > self.healed_at or not self.plan.faults):
                return
            if now > self.healed_at + WITHIN_S:
                raise Violated(f"every run ends: not {WITHIN_S:g} s after the faults: {self._describe()}")
            await asyncio.sleep(_LOOK_S if self.server is not None else _LOOK_DOWN_S)
            if repaired_at < self.healed_at < self.loop.time():
                repaired_at = self.healed_at
                await self._repair()

    def _only_liars(self, run: Run) -> bool:
        """Whether it failed because liars alone delivered in a round: a model that diverges looks the same.

        A restart keeps the reason of a failure, and not who caused it.
        """
        liars = {fault.who for fault in self.plan.faults if fault.kind == "lie" and fault.how in {"nan", "infinity"}}
        refused = {client for client, refusal in run.state.refused.items() if refusal.fault == "not_finite"}
        failed = {client for client, failure in run.state.failed.items() if failure.not_finite}
        return "values that are not finite" in run.record.reason and len(liars) >= 2 and refused | failed <= liars

    async def _repair(self) -> None:
        """What an operator repairs when all faults are over."""
        for fault in self.plan.faults:
            if fault.kind == "operator" and fault.how == "ban":
                await operators.act(self, "unban", fault.who)
        run = self.run()
        if run is not None and run.status == "paused":
            await operators.act(self, "resume")

    def _register_again(self) -> None:
        """A device whose disk was full when it heard of the end removes its files when it registers again."""
        left = {path.partition("/")[0] for path in files_left(self)}
        for name in left & {fault.who for fault in self.plan.faults if fault.kind == "full"}:
            self._kill(name, 1.0)

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
