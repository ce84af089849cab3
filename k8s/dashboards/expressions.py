"""Expressions that both dashboards use, and what their series are called and coloured."""

from __future__ import annotations

PROCESS = "and on (instance, job) fl_build_info"
"""Of a metric that daemons have too: the coordinator's."""

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
"""How assignments end."""
PHASES = {
    "selecting": "text",
    "collecting": "blue",
    "reducing": "yellow",
    "stepping": "orange",
    "committing": "purple",
    "evaluating": "green",
}


def increase(metric: str, selectors: str) -> str:
    """By how much a counter grew within the window."""
    return f"increase({metric}{{{selectors}}}[$window])"


def share(runs: str, states: str, by: str = "") -> str:
    """The part of the assignments within the window that ended so; nothing where none ended. states: a pattern."""
    some = increase("fl_assignments_total", f'{runs},state=~"{states}"')
    every = increase("fl_assignments_total", f'{runs},state!="cancelled"')
    return f"sum{by} ({some}) / (sum{by} ({every}) > 0)"


def quantile(q: float, histogram: str, selectors: str = "", by: str = "le") -> str:
    """A quantile of what was observed within the window."""
    return f"histogram_quantile({q:g}, sum by ({by}) (rate({histogram}_bucket{{{selectors}}}[$window])))"


def phase_seconds(runs: str) -> str:
    """Seconds of a round that each phase takes, so that their sum is a round."""
    spent = f"sum by (phase) (rate(fl_phase_seconds_sum{{{runs}}}[$window]))"
    rounds = f"sum (rate(fl_round_seconds_count{{{runs}}}[$window]))"
    return f"{spent} / on () group_left () ({rounds} > 0)"


def since_commit(runs: str) -> str:
    """Seconds since each run's last commit, of those that are running."""
    running = f'fl_run_state{{{runs},state="running"}} == 1'
    return f"(time() - max by (run) (fl_last_commit_timestamp_seconds{{{runs}}})) and on (run) ({running})"


def evaluation(runs: str, metric: str) -> str:
    """The newest value of a metric on held-out data, by run."""
    return f'max by (run) (fl_evaluation{{{runs},metric="{metric}"}})'
