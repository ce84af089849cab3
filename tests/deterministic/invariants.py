"""The invariants of docs/measurements/reliability.md, their checks by depth, and the faults planted for each check.

`python -m tests.deterministic.invariants` writes the table of that page, which a test compares, and prints the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
    "A second coordinator on one state is refused": ("tests/fl_server/store/database/test_ownership.py",),
    "Revocations and bans survive the restoring of a backup": ("tests/integration/access/test_denials.py",),
    "A power cut loses nothing that was durable": ("tests/power",),
    "A second SIGTERM ends the coordinator at once, and no acknowledged update is lost": (
        "tests/integration/operation/test_shutdown.py",
    ),
}
"""What the simulation cannot see, with the tests that check it."""

PLANTED: dict[int, dict[str, tuple[str, int]]] = {
    1: {
        "one update is a quorum": ("a round closes with a quorum", 15),
        "a deadline closes a round below its quorum": ("a model has its fewest updates", 0),
        "more updates than the goal are accepted": ("a round closes with a quorum", 15),
        "the accepted list is in order of arrival": ("accepted lists are in order", 0),
        "a refused client may deliver again": ("no refused update counts", 257),
        "a redrawn round keeps its updates": ("admitted as in the ledger", 8),
        "refusals last for more than a round": ("a restart keeps refused", 1),
        "a reset of states stays in its epoch": ("epochs follow each other", 10),
        "lost states are kept after the reset": ("a restart keeps lost", 36),
        "a redraw is not counted": ("each draw is counted", 188),
        "a budget is not looked at": ("a budget ends the run", 13),
        "a private round waits for an update": ("a private round is drawn once", 225),
        "a restart forgets its draws": ("a restart keeps draws", 42),
        "a restart forgets refusals": ("a restart keeps refused", 1),
        "a restart forgets failures": ("a restart keeps failed", 1),
        "a restart forgets the fixed list": ("one list is fixed", 17),
        "a restart lowers the goal to the fixed list": ("a round closes with a quorum", 15),
        "a restart forgets admitted updates": ("a restart keeps admitted", 17),
        "a restart forgets how often a daemon was started": ("a restart keeps restarts", 1),
        "a restart does not wait for an evaluation": ("a restart keeps the awaited evaluations", 1),
        "a round in which nobody works stays open": ("somebody works while a round collects", 1),
        "an update of a client that is not in the cohort counts": ("admitted as in the ledger", 148),
        "an update of an earlier round counts": ("updates are of the round's model", 2),
        "a step is computed from another list than the accepted one": ("commits are of the fixed list", 0),
        "a round is announced before it is committed": ("commits come before their news", 0),
        "a run ends a round early": ("a run has all of its rounds", 2),
        "the population has no limit": ("population has its limit", 2),
        "evaluations are not judged": ("a restart keeps judged", 1),
        "no evaluation is awaited": ("a target ends the run", 0),
        "a pause does not stop new rounds": ("no round begins in a pause", 27),
        "a run that waits for clients never tries again": ("a round that waits is tried again", 53),
        "clients do not join the population": ("a restart keeps members", 2),
        "the next exchange begins with an update of the last": ("admitted as in the ledger", 3),
        "a culprit stays among the updates": ("no refused update counts", 1),
        "work is sent before its cohort is written": ("cohorts are written before their work", 0),
        "an update is acknowledged before it is written": ("acknowledged updates stay", 1),
        "an attempt has no deadline": ("a round that collects has a deadline", 0),
        "a commit skips a round": ("round after the last commit", 0),
        "the next exchange keeps the drop-outs of the last": ("only drawn clients are out", 3),
        "a retry forgets who has delivered": ("only drawn clients count", 0),
        "a client that drops out fails the run": ("no run fails without a cause", 111),
        "a round has one update too many": ("a round has its goal", 2),
        "an accepted list has other digests than its updates": ("admitted updates are accepted", 0),
        "a step sums its updates in the order of arrival": ("a model is that of its list", 0),
        "an evaluation ends no run": ("a target ends the run", 22),
        "the last round is not evaluated": ("each due round is evaluated", 3),
        "a reset of states is written and not kept": ("commits are of the epoch", 36),
        "a paused run stays paused": ("every run ends", 27),
        "events that are out of date are not dropped": ("every event has a rule", 0),
        "a later attempt trains another model": ("repeated work is the same", 8),
        "a daemon that restarts gets its work any number of times": ("work goes to few processes of a daemon", 70),
        "a restart skips a round": ("a restart keeps round", 2),
        "a restart begins with the first exchange": ("a restart keeps exchange", 132),
        "a restart forgets the epoch of the states": ("a restart keeps state_epoch", 10),
        "a restart forgets a pause": ("a restart keeps paused", 82),
        "a restart forgets how long the epoch is": ("a restart keeps epoch_rounds", 1),
        "a restart forgets who has lost a state": ("a restart keeps lost", 132),
        "a restart forgets the population": ("a restart keeps members", 2),
        "a restart forgets an extension": ("a restart keeps rounds", 53),
        "a restart draws the round anew": ("a restart keeps phase", 2),
        "a restart counts attempts anew": ("a restart keeps attempt", 2),
        "a restart forgets the replacements": ("a restart keeps drawn", 19),
        "a restart judges from the start": ("a restart keeps judged_from", 1),
        "a deadline goes on while the coordinator is down": ("a deadline gives its time while up", 1),
        "a restart loses one of the fixed list": ("a restart keeps the fixed list", 1),
        "a restart lowers the goal": ("a restart keeps goal", 2),
        "draws of a round are not counted": ("a draw has one cohort", 19),
        "a repeated message leaves out who has gone": ("a stage has one message", 9),
        "a list that too few signed is followed by another": ("one list of survivors is signed", 4),
        "a sum leaves out a survivor": ("a sum has the clients of its signed list", 4),
        "a mask is opened by too few": ("enough clients open each mask", 4),
        "an abandoned round keeps its updates": ("admitted as in the ledger", 4),
        "a restart forgets the graph of shares": ("a restart keeps the graph of shares", 9),
        "a restart forgets answers to stages": ("a restart keeps answers", 9),
        "a restart forgets who has shared": ("a restart keeps sharers", 4),
        "a stage begins with the time of the one before": ("a deadline gives its time while up", 109),
        "an update that comes during a commit is not kept": ("a buffer is as in the ledger", 84),
        "a restart gives the slots of lost clients out twice": ("only free slots are filled", 40),
        "a restart forgets the buffer": ("a restart keeps the buffer", 62),
        "a restart forgets who works from earlier versions": ("a restart keeps the work of each client", 40),
        "a step has an update less than its goal": ("a step has its goal", 62),
        "an update counts however old its version is": ("no update is too stale", 18),
        "a client of a buffer trains another model": ("a step has admitted updates of their versions", 18),
        "a step is computed without its list": ("a model is that of its step", 18),
    },
    2: {
        "an update is acknowledged before it is written": ("acknowledged updates stay", 19),
        "an update is acknowledged before its file has its name": ("the log has no line of a fault", 0),
        "a repeated update gets no receipt": ("the log has no line of a fault", 74),
        "a repeated update counts twice": ("a client's updates are counted once", 24),
        "a repeat of an admitted update is told that it was refused": ("no receipt refuses an admitted update", 24),
        "a device trains with another seed than the assignment's": ("a replay has the same models", 0),
        "the files of an ended run stay in the spool": ("no file of an ended run stays", 2),
        "a daemon removes its update before it is acknowledged": ("no round restarts where nothing is lost", 10),
        "a daemon keeps its client state when an update has counted": ("no round restarts where nothing is lost", 10),
        "a client whose stream was lost is not drawn again": ("every run ends", 7),
        "the end of a run is not told to its clients": ("no file of an ended run stays", 2),
        "a daemon that was away does not learn its outcomes": ("no file of an ended run stays", 17),
        "a commit is written before its checkpoint": ("no run fails without a cause", 13),
        "a deadline goes on while the coordinator is down": ("a deadline gives its time while up", 33),
        "a run is completed a round early": ("a run has all of its rounds", 9),
        "the last round is never evaluated": ("each round is evaluated", 9),
        "an accepted list leaves out its last update": ("all updates of a cohort are accepted", 9),
        "an admitted update is written as refused": ("admitted updates are accepted", 9),
        "an attempt is written without its last client": ("asked clients are accepted", 9),
        "a commit is written with another number of updates": ("a commit tells how many updates it has", 9),
        "a commit is written with another digest": ("a round has one model", 9),
        "a daemon that restarts redraws the round": ("no round restarts where nothing is lost", 14),
        "a daemon that restarts fails the run": ("no run fails without a cause", 14),
        "a restart is not in the history": ("the history has each restart", 28),
        "a restart takes whole updates for torn ones": ("no file of an acknowledged update is lost", 45),
        "a coordinator cannot start again": ("a coordinator can always start", 28),
        "a daemon cannot start again": ("a daemon never ends by itself", 14),
        "a pause is refused": ("no call of an operator is refused", 8),
        "a pause fails": ("no call of an operator fails", 8),
        "a callback fails": ("no callback fails", 9),
        "a call fails": ("the log has no line of a fault", 9),
        "what an update contains is not checked": ("no update of a liar is admitted", 7),
        "a call turns for ever": ("the clock goes on", 9),
        "a device does not keep what it has answered": ("a device answers each stage in one way", 136),
        "a message of a stage that is sent again is another one": ("a stage has one message", 136),
        "a list of survivors is written without its last": ("a sum has the clients of its signed list", 1),
        "a pause by a full disk is not told": ("a full disk pauses a run with its reason", 24),
        "a pause by a full disk stays when there is room": ("a run goes on when there is room again", 24),
        "draws after the first are free": ("an assignment is charged before it is sent", 3),
        "a charge that a kill left alone is not counted outside": (
            "a charge is counted outside of the ledger before work is sent",
            787,
        ),
        "a commit gives its charge back": ("no less is charged than released", 3),
        "all sums have one noise": ("no two sums share noise", 3),
        "the noise has another key at each computation": ("a sum that is computed again has the same noise", 5571),
    },
}
"""By depth: each planted fault with the check that finds it and the first seed whose life does."""


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
