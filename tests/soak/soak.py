"""The soak: a first wave of daemons as warm-up, then all daemons, then none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, eventually
from tests.soak import resources
from tests.soak.daemon_pool import DaemonPool
from tests.soak.jobs import Jobs, Operator
from tests.soak.plan import GRACE_S, TASK, Plan
from tests.soak.resources import Resources, Sample
from tests.soak.verdict import Observed, compared, faults, over_time, slope_mb_per_hour

SETTLE_S = 90.0
"""Longest wait until the resources of the last clients are released: longer than keepalive and grace together."""
_REST_S = 6.0
"""Longer than any sleep of the coordinator's own tasks."""
_TICK_S = 0.5


@dataclass
class Soak:
    """One coordinator, its daemons and its runs."""

    workspace: Workspace
    plan: Plan
    log: Callable[[str], None]
    samples: list[Sample] = field(default_factory=list)
    steady: list[Resources] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = Coordinator(self.workspace, settings={"tasks": [TASK], "limits": {"reattach_grace_s": GRACE_S}})
        self.daemons = DaemonPool(self.workspace, self.server, self.plan)
        self.jobs = Jobs(self.server, self.plan)
        self.operator = Operator(self.server, self.plan.seed)
        self._began = time.monotonic()

    def run(self) -> Observed:
        """Run the soak; returns the measurements."""
        self.server.serve()
        base = self._first_wave()
        self._began = time.monotonic()
        steady = self.daemons.start_steady()
        self.jobs.begin()
        self._loop(steady)
        self.jobs.stop()
        self.operator.leave()
        self.daemons.stop_all()
        return self._observed(base, self._settled(base))

    def _first_wave(self) -> Sample:
        """Run three daemons with one run and stop them. The coordinator's resources afterwards are the base."""
        wave = [self.daemons.start_one() for _ in range(3)]
        self.log(f"first wave: {', '.join(wave)}")
        run = self.jobs.short()
        self.server.completed(run)
        self.daemons.stop_all()
        return eventually(self._at_rest, "the resources of the first wave are released", SETTLE_S)

    def _at_rest(self) -> Sample | None:
        """A sample of the coordinator without clients; None while it still releases resources."""
        first = self._sample()
        time.sleep(_REST_S)
        second = self._sample()
        same = all(before == now for _, before, now, _ in compared(first, second))
        return second if same and not second.present else None

    def _loop(self, steady: Daemon) -> None:
        """Start and stop daemons, runs and operator calls until the time is over."""
        every: dict[Callable[[], None], float] = {
            self._act: self.plan.act_s,
            self.jobs.start_next_run: 2.0,
            self._call: 7.0,
            lambda: self._measure(steady): self.plan.every_s,
        }
        due = dict.fromkeys(every, 0.0)
        while (now := self._now) < self.plan.seconds:
            for work in [work for work, at in due.items() if at <= now]:
                work()
                due[work] = now + every[work]
            time.sleep(_TICK_S)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _act(self) -> None:
        self.daemons.act(self._now)

    def _call(self) -> None:
        if self._now > self.plan.act_s:
            self.operator.call(self.daemons.stopped)

    def _measure(self, steady: Daemon) -> None:
        sample = self._sample()
        self.log(self._line(sample))
        self.samples.append(sample)
        if steady.exit_code is None:
            self.steady.append(resources.of_process(steady.pid, self._state_dir(steady), self._now))

    def _sample(self) -> Sample:
        state_dir = self._state_dir(self.server)
        # Read the resources first: a request for metrics opens a socket in the process.
        held = resources.of_process(self.server.pid, state_dir, self._now)
        values = resources.metrics(str(self.server.settings["metrics_listen"]))
        return Sample(
            held=held,
            tasks=int(values["fl_event_loop_tasks"]),
            sessions=int(values["fl_sessions"]),
            present=int(values.get('fl_clients{state="present"}', 0)),
            series=len(values),
            disk_mb=resources.disk_mb(state_dir),
        )

    @staticmethod
    def _state_dir(process: Coordinator | Daemon) -> Path:
        return Path(process.settings["state_dir"])

    def _line(self, sample: Sample) -> str:
        held, disk = sample.held, sample.disk_mb
        return (
            f"{held.at_s:5.0f} s  rss {held.rss_mb:.1f} MB  files {held.files}  sockets {held.sockets}  "
            f"threads {held.threads}  tasks {sample.tasks}  sessions {sample.sessions}  here {len(self.daemons)}  "
            f"rounds {self.jobs.rounds}  spool {disk['spool']:.2f}  checkpoints {disk['checkpoints']:.2f}  "
            f"ledger {disk['ledger']:.2f}  log {disk['log']:.2f} MB"
        )

    def _settled(self, base: Sample) -> Sample:
        """Wait until everything is released, or until the time limit; returns the last sample."""
        ends = time.monotonic() + SETTLE_S
        while True:
            sample = self._sample()
            if time.monotonic() > ends or all(now <= before + more for _, before, now, more in compared(base, sample)):
                self.log(self._line(sample))
                return sample
            time.sleep(1.0)

    def _observed(self, base: Sample, after: Sample) -> Observed:
        measured = [sample for sample in self.samples if sample.held.at_s >= self.plan.warm_up_s]
        state_dir = self._state_dir(self.server)
        checkpoints = {run.name: sum(1 for _ in run.iterdir()) for run in (state_dir / "checkpoints").iterdir()}
        return Observed(
            base=base,
            samples=measured,
            steady=[held for held in self.steady if held.at_s >= self.plan.warm_up_s],
            after=after,
            checkpoints=checkpoints,
            keep=self.plan.keep,
            spool=sorted(
                str(path.relative_to(state_dir))
                for path in resources.paths(state_dir / "spool")
                if path != state_dir / "spool/spare"  # the folder of spare files; it may be empty, and stays
            ),
            faults=[*self.daemons.faults, *self.jobs.faults],
        )


def summary(soak: Soak, seen: Observed) -> dict[str, Any]:
    """The results of a soak, for JSON."""
    held, steady = [sample.held for sample in seen.samples], seen.steady
    found = faults(seen)
    return {
        "plan": asdict(soak.plan),
        "rounds": soak.jobs.rounds,
        "runs": dict(soak.jobs.counts),
        "daemons": dict(soak.daemons.counts),
        "operator_calls": soak.operator.calls,
        "coordinator": {**_memory(held), "most": _most(held)},
        "steady_daemon": {**_memory(steady), "most": _most(steady)},
        "tasks": {"base": seen.base.tasks, "most": max(sample.tasks for sample in seen.samples)},
        "metric_lines": {"base": seen.base.series, "after": seen.after.series},
        "without_clients": {what: {"before": a, "after": b} for what, a, b, _ in compared(seen.base, seen.after)},
        "disk_mb": {"base": seen.base.disk_mb, "after": seen.after.disk_mb},
        "checkpoints": dict(seen.checkpoints),
        "spool_left": list(seen.spool),
        "verdict": "no leak" if not found else "leaks",
        "faults": found,
    }


def _memory(held: Sequence[Resources]) -> dict[str, Any]:
    start, middle, end = over_time([each.rss_mb for each in held])
    slope = slope_mb_per_hour(held)
    return {"rss_mb": {"start": start, "middle": middle, "end": end}, "slope_mb_per_hour": round(slope, 2)}


def _most(held: Sequence[Resources]) -> dict[str, int]:
    names = ("files", "sockets", "others", "threads", "state_files")
    return {name: max(getattr(each, name) for each in held) for name in names}
