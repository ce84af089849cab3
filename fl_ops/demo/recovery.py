"""The demo's second part: the coordinator is killed in a round and started again, and the models are compared.

The first algorithm is trained once more for a few rounds, with the settings and the seed of its first run. SIGKILL ends
the coordinator as soon as it has acknowledged an update of a round. It starts again with its state directory and its
ports, the daemons come back, and the round goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fl_ops.demo.fleet import Fleet, OnProgress
from fl_ops.demo.settings import DemoSettings, Method, title
from fl_ops.errors import OpsError, Refused
from fl_web.facts.rounds import Round, rounds_of
from protos.run_file import parse_run

KILLED_IN, ROUNDS = 2, 5
"""The round, counted from 0, in which the coordinator is killed, and the rounds that are compared."""
_WAIT_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Recovery:
    """What became of the killed run."""

    algorithm: str
    round: int
    """The round in which the coordinator was killed, counted from 0."""
    acknowledged: str
    """The client whose update the coordinator had acknowledged last."""
    down_s: float
    """Seconds from SIGKILL to the commit of that round."""
    equal: tuple[bool, ...]
    """Whether the model has the bits of the undisturbed run, after each round."""

    @property
    def sentence(self) -> str:
        """The result for people."""
        rounds, same = len(self.equal), sum(self.equal)
        outcome = (
            f"the models of all {rounds} rounds have the bits of the undisturbed run"
            if same == rounds
            else f"the models of {rounds - same} of {rounds} rounds differ from the undisturbed run"
        )
        return (
            f"SIGKILL ended the coordinator in round {self.round} of {title(self.algorithm)}, when it had acknowledged "
            f"the update of {self.acknowledged}. It started again in that round, which was committed "
            f"{self.down_s:.1f} s after the kill: {outcome}."
        )

    def as_json(self) -> dict[str, Any]:
        """The facts for the JSON file."""
        return {
            "algorithm": self.algorithm,
            "round": self.round,
            "acknowledged": self.acknowledged,
            "seconds_to_commit": round(self.down_s, 2),
            "equal_models": list(self.equal),
        }


def recover(
    fleet: Fleet, settings: DemoSettings, method: Method, undisturbed: Sequence[Round], on_progress: OnProgress
) -> Recovery | None:
    """Kill the coordinator in a round. None for a run with too few rounds. Raises OpsError if it does not go on.

    undisturbed: the rounds of the method's first run.
    """
    if settings.rounds <= KILLED_IN:
        return None
    rounds, name = min(ROUNDS, settings.rounds), title(method.algorithm)
    content = settings.run(method)
    content["name"] += "-killed"
    with fleet.connect() as client:
        run_id = client.runs.create_run(parse_run(content)).run.run_id
        on_progress(f"{name} again, for {rounds} rounds; the coordinator will be killed in round {KILLED_IN}")
        for event in client.runs.watch_run(run_id):
            if event.run.rounds_done >= KILLED_IN and event.event == "admitted":
                break
    killed = time.monotonic()
    fleet.kill_coordinator()
    on_progress(f"SIGKILL to the coordinator: the update of {event.detail} is acknowledged, the round is not committed")
    fleet.restart_coordinator()
    with fleet.connect() as client:
        in_round = client.runs.get_run(run_id, 0).run.rounds_done
        on_progress(
            f"the coordinator serves again after {time.monotonic() - killed:.1f} s, and goes on in round {in_round}"
        )
        committed = 0.0
        while (done := client.runs.get_run(run_id, 0).run.rounds_done) < rounds or not committed:
            committed = committed or (time.monotonic() if done > in_round else 0.0)
            fleet.check()
            if time.monotonic() > killed + _WAIT_S:
                raise Refused(f"the killed run has {done} of {rounds} rounds after {_WAIT_S:g} s: see the logs")
            time.sleep(_POLL_S)
        again = rounds_of(client.runs.get_run(run_id).rounds)
        with suppress(OpsError):  # it may have ended
            client.runs.stop_run(run_id, "the demo compares its first rounds")
    pairs = zip([row.digest for row in again][:rounds], [row.digest for row in undisturbed], strict=False)
    equal = tuple(one == other != "" for one, other in pairs)
    recovery = Recovery(method.algorithm, in_round, event.detail, committed - killed, equal)
    on_progress(recovery.sentence)
    return recovery
