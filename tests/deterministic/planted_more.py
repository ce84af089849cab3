"""More faults planted into the whole system: of rounds, of what is written, of starts, of operators, of calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import update as change

from fl_client.secure_aggregation.members import Members
from fl_client.storage.state import StateDir
from fl_server.admission.client_rules import UpdateRefused
from fl_server.admission.gate import AdmissionGate
from fl_server.clients.fleet import Fleet
from fl_server.errors import InvalidInput
from fl_server.rounds import collecting, ending, events
from fl_server.rounds.machine import RULES
from fl_server.rounds.selecting import restart_round
from fl_server.rounds.state import Phase, RoundState
from fl_server.run import restore, restore_round
from fl_server.run.record import RunStatus
from fl_server.run.secure_stages import SecureStages
from fl_server.runs.actions import RunActions
from fl_server.store.database import schema
from fl_server.store.database.store import Store
from fl_server.uploads.receiver import Verdicts
from tests.deterministic.planted import Patch, ends_a_round_early, last_round_not_evaluated


def _list_leaves_out_the_last() -> Patch:
    close = collecting.close
    return collecting, "close", lambda state: close(replace(state, goal=max(1, state.goal - 1)))


def _written_as_refused() -> Patch:
    record = Store.record_update

    def recorded(self: Store, update: Any, *rest: Any) -> Any:
        record(self, replace(update, admitted=False), *rest)
        return update

    return Store, "record_update", recorded


def _attempt_without_its_last() -> Patch:
    written = Store.commit

    def commit(self: Store, record: Any, *rest: Any, **more: Any) -> None:
        written(self, record, *rest, **more)
        for attempt in self.attempts(record.run_id, record.round):
            place = {"run_id": record.run_id, "round": record.round, "attempt": attempt.attempt}
            with self._transaction("take a client out of a cohort") as db:
                db.execute(change(schema.attempts).filter_by(**place).values(cohort=attempt.cohort[:-1]))

    return Store, "commit", commit


def _commit(**changes: Callable[[Any], Any]) -> Callable[[], Patch]:
    """A commit is written with another value in a field."""

    def planted() -> Patch:
        written = Store.commit

        def commit(self: Store, record: Any, *rest: Any, **more: Any) -> None:
            values = {name: change(getattr(record, name)) for name, change in changes.items()}
            written(self, replace(record, **values), *rest, **more)

        return Store, "commit", commit

    return planted


def _daemon_restarts(rule: Callable[[RoundState], Any]) -> Callable[[], Patch]:
    """What becomes of a round in which a daemon restarts."""
    place = (Phase.COLLECTING, events.ClientRestarted)
    return lambda: (RULES, place, lambda state, event: rule(state))


def _fail_the_run(state: RoundState) -> Any:
    return ending.end_by_fault(state, ("task", "its daemon restarted"))


def _restart_not_told() -> Patch:
    async def record(run: Any) -> None:
        pass

    return restore, "_record_restart", record


def _updates_taken_for_torn() -> Patch:
    return restore_round, "_is_whole", lambda spool, update: False


def _never_starts_again() -> Patch:
    start, starts = Fleet.start, Counter[str]()

    async def started(self: Fleet) -> None:
        starts["all"] += 1
        if starts["all"] > 1:
            raise RuntimeError("the second start")
        await start(self)

    return Fleet, "start", started


def _daemon_never_starts_again() -> Patch:
    claim, starts = StateDir.claim, Counter[str]()

    def claimed(self: StateDir, client_id: str) -> None:
        starts[client_id] += 1
        if starts[client_id] > 1:
            raise RuntimeError("the second start")
        claim(self, client_id)

    return StateDir, "claim", claimed


def _pause_raises(error: Exception) -> Callable[[], Patch]:
    async def pause(self: RunActions, run: Any, actor: str) -> None:
        raise error

    return lambda: (RunActions, "pause", pause)


def _content_not_checked() -> Patch:
    check = AdmissionGate.check_content

    def checked(self: AdmissionGate, *file: Any) -> Any:
        try:
            return check(self, *file)
        except UpdateRefused:
            return {"delta": 1.0}

    return AdmissionGate, "check_content", checked


def _repeated(work: Callable[[], Any]) -> Callable[[], Patch]:
    """What happens at each update in place of the question whether it is a repeat."""

    async def repeated(self: Verdicts, submission: Any) -> None:
        await work()

    return lambda: (Verdicts, "repeated", repeated)


async def _callback_fails() -> None:
    asyncio.get_running_loop().call_soon(int, "a callback")


async def _call_fails() -> None:
    raise RuntimeError("a call")


async def _turns_for_ever() -> None:
    while True:
        await asyncio.sleep(0)


def _pause_not_told() -> Patch:
    return RunStatus, "writing_failed", lambda self, why: None


def _pause_stays() -> Patch:
    failed = RunStatus.writing_failed
    return RunStatus, "writing_failed", lambda self, why: failed(self, why) if why else None


def _answers_not_kept() -> Patch:
    return Members, "_write", staticmethod(lambda path, member: None)


def _repeated_message_differs() -> Patch:
    message, sent = SecureStages.message_for, Counter[tuple[Any, ...]]()

    def message_for(self: SecureStages, client: str) -> Any:
        if (made := message(self, client)) is not None:
            sent[place := (client, made.key.round, made.draw, made.stage)] += 1
            made.content = made.content[: len(made.content) - (sent[place] > 1)]
        return made

    return SecureStages, "message_for", message_for


def _cohort_of_a_restart_lacks_one() -> Patch:
    restored = SecureStages.restore

    async def restore(self: SecureStages) -> Any:
        graph = await restored(self)
        if self._terms is not None:
            self._terms = replace(self._terms, cohort=self._terms.cohort[:-1])
        return graph

    return SecureStages, "restore", restore


def _list_without_its_last() -> Patch:
    opened = Store.open_stage

    def open_stage(self: Store, stage: Any, *rest: Any) -> None:
        members = stage.members[:-1] if stage.stage == Phase.SIGNING.value else stage.members
        opened(self, replace(stage, members=members), *rest)

    return Store, "open_stage", open_stage


MORE: dict[str, Callable[[], Patch]] = {
    "a run is completed a round early": ends_a_round_early,
    "the last round is never evaluated": last_round_not_evaluated,
    "an accepted list leaves out its last update": _list_leaves_out_the_last,
    "an admitted update is written as refused": _written_as_refused,
    "a commit takes the last client out of its cohort": _attempt_without_its_last,
    "a commit is written with another number of updates": _commit(accepted=lambda count: count + 1),
    "a commit is written with another digest": _commit(model_digest=lambda digest: digest[::-1]),
    "a daemon that restarts redraws the round": _daemon_restarts(restart_round),
    "a daemon that restarts fails the run": _daemon_restarts(_fail_the_run),
    "a restart is not in the history": _restart_not_told,
    "a restart takes whole updates for torn ones": _updates_taken_for_torn,
    "a coordinator cannot start again": _never_starts_again,
    "a daemon cannot start again": _daemon_never_starts_again,
    "a pause is refused": _pause_raises(InvalidInput("run_id", "no pause", "one")),
    "a pause fails": _pause_raises(RuntimeError("a pause")),
    "a callback fails": _repeated(_callback_fails),
    "a call fails": _repeated(_call_fails),
    "what an update contains is not checked": _content_not_checked,
    "a call turns for ever": _repeated(_turns_for_ever),
    "a pause by a full disk is not told": _pause_not_told,
    "a device does not keep what it has answered": _answers_not_kept,
    "a message of a stage that is sent again is another one": _repeated_message_differs,
    "a list of survivors is written without its last": _list_without_its_last,
    "a restart leaves a client out of a draw": _cohort_of_a_restart_lacks_one,
    "a pause by a full disk stays when there is room": _pause_stays,
}
