"""The checks of a life that has ended: what docs/measurements/reliability.md promises, where it can be seen here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fl_ops.simulate.federation import Federation
from fl_ops.simulate.replay import config_of, find_run, replay_of
from fl_server.store.database.store import Store
from fl_tasks import load_task
from tests.deterministic import daemon
from tests.deterministic.plan import ACCOUNT, SERVER

if TYPE_CHECKING:
    from tests.deterministic.life import Life

RUN = "r"


def check(life: Life) -> None:
    """Check everything that must hold at the end of a life. Raises AssertionError, which begins with a check's name."""
    assert life.server is not None
    store = life.server.store
    _check_rounds(life, store)
    _check_acknowledged(life, store)
    _check_history(life, store)
    if life.plan.job.unit == "client":
        life.private.check(store, RUN, ACCOUNT)
    if life.plan.job.unit == "record":
        life.records.check()
    left = files_left(life)
    assert not left, f"no file of an ended run stays: {left}"
    if life.effects.objects is not None:
        life.effects.objects.check()
    _check_replay(life, store)
    errors = life.loop_errors()
    assert not errors, f"no callback fails: {errors[:3]}"


def _check_rounds(life: Life, store: Store) -> None:
    """Each round was committed once, from admitted updates of its cohort; each update counts once.

    With a buffer the updates are of cohorts of some rounds before, too.
    """
    commits, record = store.commits(RUN), store.runs()[0]
    numbers, rounds = [commit.round for commit in commits], record.spec["stop"]["rounds"]
    whole = record.state in {"stopped", "failed"} or len(commits) == rounds  # one that failed had a cause
    assert whole and numbers == list(range(len(commits))), f"a run has all of its rounds: {numbers} of {rounds}"  # noqa: PT018 - one check
    updates = set[tuple[str, int]]()
    for commit in commits:
        taken: list[tuple[str, int, bytes]] = []
        for exchange in range(life.plan.job.exchanges):
            taken = store.taken(RUN, commit.round, exchange) or []
            _check_exchange(life, store, (commit.round, exchange), taken)
        updates |= {(client, version) for client, version, _ in taken}  # of the last exchange
        counted = f"{commit.accepted}, and the list of round {commit.round} has {len(taken)}"
        assert commit.accepted == len(taken), f"a commit tells how many updates it has: {counted}"
        assert commit.metrics, f"each round is evaluated: round {commit.round} never was"
    times = Counter(client for client, _ in updates)
    for device in store.clients() if life.plan.job.unit != "client" else ():  # its cohorts are not counted by client
        name, counted_times = device.client_id, device.updates_counted
        listed = f"{name} has {times[name]} updates in lists and was counted {counted_times} times"
        assert counted_times == times[name], f"a client's updates are counted once: {listed}"


def _check_exchange(life: Life, store: Store, place: tuple[int, int], taken: Sequence[tuple[str, int, bytes]]) -> None:
    """The accepted list of (round, exchange): (client, the round of its update, digest)."""
    (round_, exchange), where = place, f"{place[0]}.{place[1]}"
    versions, most = {version for _, version, _ in taken}, life.plan.job.max_staleness
    asked = {
        (client, version)
        for version in versions
        if round_ - (most or 0) <= version <= round_
        for attempt in store.attempts(RUN, version)
        for client in attempt.cohort
    }
    strangers = {(client, version) for client, version, _ in taken} - asked
    assert not strangers, f"asked clients are accepted: {strangers} in round {where}, which asked {asked}"
    rows = [line for version in versions | {round_} for line in store.updates(RUN, version, exchange) if line.admitted]
    admitted = {(line.client_id, line.round, line.digest) for line in rows}
    others = set(taken) - admitted
    assert not others, f"admitted updates are accepted: those of {others} in round {where} are others"
    signed = [stage.members for stage in store.stages(RUN, round_) if stage.stage == "signing"]
    clients = tuple(client for client, _, _ in taken)
    assert signed in ([], [clients]), f"a sum has the clients of its signed list: {clients}, not {signed}"
    missing = {client for client, _, _ in admitted - set(taken)} if life.plan.job.cohort else set()
    assert not missing, f"all updates of a cohort are accepted: those of {missing} in round {where} are not"


def _check_acknowledged(life: Life, store: Store) -> None:
    """Every acknowledged update of a committed round is in the ledger, admitted, with the acknowledged digest.

    No receipt says that an admitted update was refused.
    """
    restarted = _rounds_with(life, store, {"round_restarted", "states_restarted", "culprit_dropped"})
    restarted |= set(range(len(store.commits(RUN)), 100))  # these are not committed
    given_up = 0
    if life.plan.job.max_staleness is not None:  # what no step had taken at the end has a line in the history
        given_up = sum(entry.event == "update_given_up" for entry in store.history(RUN, 10_000))
    for (client, round_, exchange), digests in life.seen.acknowledged.items():
        line = store.update_of(RUN, round_, exchange, client)
        kept = line is not None and line.admitted and {line.digest} == set(digests)
        if not kept and line is None and given_up:
            given_up -= 1
            continue
        assert kept or round_ in restarted, f"acknowledged updates stay: that of {client} in round {round_} does not"
    for (client, round_, exchange), digests in life.seen.refused.items():
        line = store.update_of(RUN, round_, exchange, client)
        right = line is None or not line.admitted or line.digest not in digests
        assert right or round_ in restarted, f"no receipt refuses an admitted update: {client}, round {round_}"


def _rounds_with(life: Life, store: Store, events: set[str]) -> set[int]:
    found = set()
    for entry in store.history(RUN, 10_000):
        if entry.event in events:
            match = re.match(r"round (\d+)", entry.detail)
            found |= {int(match[1])} if match else set(range(100))
    return found


def _check_history(life: Life, store: Store) -> None:
    """The history has each restart, and no acknowledged update was lost."""
    events, kinds = Counter(entry.event for entry in store.history(RUN, 10_000)), set(life.seen.happened)
    assert not events["update_dropped"], f"no file of an acknowledged update is lost: {events['update_dropped']} were"
    away = life.plan.job.stage_s and any(fault.who != SERVER for fault in life.plan.faults)
    if not kinds & {"wipe", "operator", "lie", "full"} and not away:
        again = {"round_restarted", "states_restarted"} & set(events)
        assert not again, f"no round restarts where nothing is lost: {again}"
    if not kinds & {"full", "away", "store"}:
        restarts, lines = len(life.seen.had_run) - 1, events["run_recovered"]
        assert lines >= restarts, f"the history has each restart: {lines} of {restarts}"


def files_left(life: Life) -> list[str]:
    """Files of the run in the spool, and updates and states of it on the devices; none are left soon after its end."""
    spool = life.config.state_dir / "spool" / f"run-{RUN}"
    left = [f"spool/{path.relative_to(spool)}" for path in spool.rglob("*") if path.is_file()]
    for name in life.plan.clients:
        for folder in ("pending", "states"):
            paths = (life.folder / name / folder).glob("*")
            left += [f"{name}/{folder}/{path.name}" for path in paths if path.name != "spare.part"]
    if (objects := life.effects.objects) is not None:
        left += [f"store/{key}" for key in objects.there.keys() - objects.put_late if f"/spool/run-{RUN}/" in key]
    return sorted(left)


def _check_replay(life: Life, store: Store) -> None:
    """A replay of the accepted lists gives the same models bit for bit."""
    config = config_of(find_run(store, RUN))
    clients = {name: daemon.local_task(name, life.model) for name in life.plan.clients}
    secret = life.server.services.secrets.read(RUN) if life.plan.job.unit == "client" and life.server else b""
    task = load_task(config.task.name, config.task.options)
    with Federation(config, task, clients, secret=secret) as federation:
        for done in replay_of(store, RUN, federation).rounds():
            others = f"; updates of {done.differing} differ" if done.differing else ""
            assert done.same, f"a replay has the same models: round {done.round} is {done.digest}{others}"
