"""Expressions of both dashboards, and the names and colours of their series."""

from __future__ import annotations

PROCESS = "and on (instance, job) fl_build_info"
"""Selects the coordinator's series of a metric that daemons or workers have too."""
WORKERS = "and on (instance, job) fl_worker_build_info"
"""Selects the workers' series."""

RUN_STATES = {
    "waiting": "yellow",
    "running": "green",
    "paused": "blue",
    "completed": "purple",
    "stopped": "text",
    "failed": "red",
}
OUTCOMES = {"committed": "green", "abandoned": "red", "below quorum": "orange"}
ENDS = {"admitted": "green", "cancelled": "text", "lost": "orange", "failed": "purple", "refused": "red"}
"""The end states of assignments."""
PHASES = {
    "selecting": "text",
    "agreeing": "text",
    "tossing": "text",
    "sharing": "text",
    "collecting": "blue",
    "signing": "text",
    "opening": "text",
    "reducing": "yellow",
    "stepping": "orange",
    "committing": "purple",
    "evaluating": "green",
}


def increase(metric: str, selectors: str) -> str:
    """Return the increase of a counter within the window."""
    return f"increase({metric}{{{selectors}}}[$window])"


def share(runs: str, states: str, by: str = "") -> str:
    """Return the share of the ended assignments with these states; empty if none ended. states: a pattern."""
    some = increase("fl_assignments_total", f'{runs},state=~"{states}"')
    every = increase("fl_assignments_total", f'{runs},state!="cancelled"')
    return f"sum{by} ({some}) / (sum{by} ({every}) > 0)"


def quantile(q: float, histogram: str, selectors: str = "", by: str = "le") -> str:
    """Return a quantile of the observations within the window."""
    return f"histogram_quantile({q:g}, sum by ({by}) (rate({histogram}_bucket{{{selectors}}}[$window])))"


def loop_lag(programs: str, by: str = "le") -> str:
    """Return how late 99% of the event loop's wake-ups are at most. programs: PROCESS or WORKERS."""
    return f"histogram_quantile(0.99, sum by ({by}) (rate(fl_event_loop_lag_seconds_bucket[$window]) {programs}))"


def phase_seconds(runs: str) -> str:
    """Return the seconds of each phase of a round; their sum is the duration of a round."""
    spent = f"sum by (phase) (rate(fl_phase_seconds_sum{{{runs}}}[$window]))"
    rounds = f"sum (rate(fl_round_seconds_count{{{runs}}}[$window]))"
    return f"{spent} / on () group_left () ({rounds} > 0)"


def since_commit(runs: str) -> str:
    """Return the seconds since the last commit of each running run."""
    running = f'fl_run_state{{{runs},state="running"}} == 1'
    return f"(time() - max by (run) (fl_last_commit_timestamp_seconds{{{runs}}})) and on (run) ({running})"


def evaluation(runs: str, metric: str) -> str:
    """Return the newest value of a metric on held-out data, by run."""
    return f'max by (run) (fl_evaluation{{{runs},metric="{metric}"}})'
