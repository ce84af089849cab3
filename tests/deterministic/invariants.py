"""The invariants of docs/measurements/reliability.md, and their checks by depth.

`python -m tests.deterministic.invariants` writes the table of that page, which a test compares, and prints the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.deterministic.first_seeds import PLANTED

PAGE = Path(__file__).parents[2] / "docs/measurements/reliability.md"
BEGIN, END = "<!-- invariants -->\n", "<!-- end of invariants -->\n"

RESTORED = (
    "round", "exchange", "state_epoch", "rounds", "paused", "epoch_rounds", "members", "lost", "phase", "goal",
    "refused", "failed", "restarts", "attempt", "admitted", "drawn", "judged", "judged_from", "draws",
    "sharers",
)  # fmt: skip
"""Fields of the state of a run that a restart keeps."""

INVARIANTS: dict[str, dict[int, tuple[str, ...]]] = {
    "A restart continues in the same round, with the same cohort, updates and refusals": {
        1: (
            *(f"a restart keeps {name}" for name in RESTORED),
            "a restart keeps the fixed list",
            "a restart keeps the awaited evaluations",
            "a restart keeps the graph of shares",
            "a restart keeps answers",
            "admitted as in the ledger",
        ),
        2: ("no round restarts where nothing is lost", "no file of an acknowledged update is lost"),
    },
    "An acknowledged update is durable, and never lost": {
        1: ("acknowledged updates stay",),
        2: ("acknowledged updates stay",),
    },
    "An update counts once, and only for the round, exchange and model for which its client was asked": {
        1: (
            "only drawn clients count",
            "only drawn clients are out",
            "cohorts are written before their work",
            "admitted updates are accepted",
            "accepted lists are in order",
            "updates are of the round's model",
            "repeated work is the same",
        ),
        2: (
            "asked clients are accepted",
            "admitted updates are accepted",
            "all updates of a cohort are accepted",
            "a commit tells how many updates it has",
            "a client's updates are counted once",
            "cohorts are written before their work",
        ),
    },
    "A repeat of an update gets the first verdict again": {2: ("no receipt refuses an admitted update",)},
    "The models are those of a replay, bit for bit": {2: ("a replay has the same models",)},
    "A refused update never counts": {1: ("no refused update counts",), 2: ("no update of a liar is admitted",)},
    "A daemon that is killed again and again gets its work a few times": {
        1: ("work goes to few processes of a daemon",),
    },
    "A round closes with a quorum, and with no more updates than its goal": {
        1: ("a round closes with a quorum", "a model has its fewest updates", "a round has its goal"),
    },
    "A model is that of one fixed list, and durable before any client learns of it": {
        1: (
            "one list is fixed",
            "commits are of the fixed list",
            "a model is that of its list",
            "round after the last commit",
            "commits come before their news",
        ),
        2: ("a round has one model",),
    },
    "Client states restart together, and a population has its limit": {
        1: ("epochs follow each other", "commits are of the epoch", "population has its limit"),
    },
    "A deadline gives its whole time, without the time in which the coordinator is down": {
        1: ("a round that collects has a deadline", "a deadline gives its time while up"),
        2: ("a deadline gives its time while up",),
    },
    "A run waits for clients, and goes on when they come": {
        1: ("somebody works while a round collects", "a round that waits is tried again", "every run ends"),
        2: ("every run ends", "the clock goes on"),
    },
    "A run ends for the first reason that there is": {
        1: (
            "no run fails without a cause",
            "a run has all of its rounds",
            "a target ends the run",
            "each due round is evaluated",
        ),
        2: ("no run fails without a cause", "a run has all of its rounds", "each round is evaluated"),
    },
    "Each draw of a private run is charged, its budget ends it, and nobody is drawn for others": {
        1: ("each draw is counted", "a budget ends the run", "a private round is drawn once"),
    },
    "A draw is charged, durably and outside of the ledger too, before its work is sent, and stays charged": {
        2: (
            "an assignment is charged before it is sent",
            "a charge is counted outside of the ledger before work is sent",
            "no less is charged than released",
        ),
    },
    "A device charges private work once, durably, before its first step, and stops at its own limit": {
        2: (
            "private steps are charged before the first one",
            "a charge is counted beside the account before its steps",
            "a device is charged for all that it sent",
            "the same private work is charged once",
            "a device stops at its own limit",
        ),
    },
    "Two updates of private steps never share noise, and the same work has the same": {
        2: ("no two updates of a device share noise", "the same private work has the same bits"),
    },
    "Two noisy sums never share noise, and a sum that is computed again has the same": {
        2: ("no two sums share noise", "a sum that is computed again has the same noise"),
    },
    "Secure aggregation: one cohort a draw, one answer a stage, one signed list of survivors, the sum of these": {
        1: (
            "a draw has one cohort",
            "a stage has one message",
            "one list of survivors is signed",
            "a sum has the clients of its signed list",
            "enough clients open each mask",
        ),
        2: (
            "a draw has one cohort",
            "a stage has one message",
            "a device answers each stage in one way",
            "a sum has the clients of its signed list",
        ),
    },
    "With a buffer: what is acknowledged is in it until one step has it, from a version that is not too old": {
        1: (
            "a buffer is as in the ledger",
            "only free slots are filled",
            "a restart keeps the buffer",
            "a restart keeps the work of each client",
            "a step has its goal",
            "no update is too stale",
            "a step has admitted updates of their versions",
            "a model is that of its step",
        ),
    },
    "A paused run begins no round": {1: ("no round begins in a pause",)},
    "A disk that is full and a database that is away pause a run, with the reason, until they are back": {
        2: ("a full disk pauses a run with its reason", "a run goes on when there is room again"),
    },
    "What the ledger counts is in the object store, whatever fails and whatever a dead leader still writes": {
        2: ("what the ledger counts is in the store",),
    },
    "The history tells each restart": {2: ("the history has each restart",)},
    "Devices and coordinator remove the files of a run that has ended": {2: ("no file of an ended run stays",)},
    "Programs start again after a kill, and operators get their answers": {
        2: (
            "a coordinator can always start",
            "a daemon never ends by itself",
            "no call of an operator is refused",
            "no call of an operator fails",
        ),
    },
    "No code of the product meets an error that it did not expect": {
        1: ("every event has a rule",),
        2: ("the log has no line of a fault", "no callback fails"),
    },
}
"""What holds in every life, with its checks by depth. A violation begins with the name of its check and a colon."""

ELSEWHERE = {
    "A transfer that is cut goes on from the kept part": ("tests/chaos/test_every_chunk.py",),
    "Bytes that are damaged in transfer or on the disk never count": ("tests/chaos/test_each_fault.py",),
    "A training step that never ends takes no other work with it": ("tests/integration/clients/test_hanging_step.py",),
    "A fault that all clients have ends a run for the same reason with a kill between any two of them": (
        "tests/fl_server/rounds/test_faults_of_runs.py",
    ),
    "Sums of metrics and averaged models survive kills": (
        "tests/fl_server/run/evaluation/test_client_restarts.py",
        "tests/fl_server/run/test_averaged_model.py",
    ),
    "A client whose updates are refused again and again is left out for a while": (
        "tests/integration/clients/test_quarantine.py",
    ),
    "Code of a task or a method that raises, crashes or hangs harms its own run alone": (
        "tests/integration/operation/test_tasks_that_end_processes.py",
        "tests/integration/operation/test_code_that_ends_the_coordinator.py",
    ),
    "A kill at each write of a private round, of the coordinator or a device, changes no bit and no charge": (
        "tests/chaos/test_private_rounds.py",
    ),
    "A leader that was replaced changes nothing: neither rows nor objects that count": (
        "tests/deterministic/test_replaced.py",
    ),
    "A second coordinator on one state is refused": ("tests/fl_server/store/database/test_ownership.py",),
    "Revocations and bans survive the restoring of a backup": ("tests/integration/access/test_denials.py",),
    "A power cut loses nothing that was durable": ("tests/power",),
    "A second SIGTERM ends the coordinator at once, and no acknowledged update is lost": (
        "tests/integration/operation/test_shutdown.py",
    ),
}
"""What the simulation cannot see, with the tests that check it."""


def table() -> str:
    """The table of the page: a row for each invariant, with the number of its checks and of the faults they find."""
    rows = ["| invariant | checks, depth 1 | checks, depth 2 | planted faults |", "| --- | --: | --: | --: |"]
    for invariant, by_depth in INVARIANTS.items():
        counts = [str(len(by_depth.get(depth, ())) or "") for depth in (1, 2)]
        faults = sum(len(_faults(depth, check)) for depth, checks in by_depth.items() for check in checks)
        rows.append(f"| {invariant} | {' | '.join(counts)} | {faults} |")
    rows += ["", "| invariant that the simulation cannot see | tests |", "| --- | --- |"]
    rows += [f"| {invariant} | {', '.join(f'`{test}`' for test in tests)} |" for invariant, tests in ELSEWHERE.items()]
    return "\n".join(rows) + "\n"


def checks() -> Iterator[str]:
    """A line for each check: depth, name, and the planted faults that it finds."""
    for invariant, by_depth in INVARIANTS.items():
        yield invariant
        for depth, names in by_depth.items():
            yield from (f"  {depth}  {check}: {'; '.join(_faults(depth, check))}" for check in names)


def _faults(depth: int, check: str) -> list[str]:
    return [fault for fault, (found_by, _) in PLANTED[depth].items() if found_by == check]


def page() -> str:
    """The whole page, with the table of today."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(*checks(), sep="\n")  # noqa: T201 - the command's output
