"""The checks of a life that has ended: what docs/measurements/reliability.md promises, where it can be seen here."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from fl_ops.simulate.federation import Federation
from fl_ops.simulate.replay import Replay, config_of, find_run
from fl_server.store.database.store import Store
from fl_tasks import load_task
from tests.deterministic import daemon

if TYPE_CHECKING:
    from tests.deterministic.life import Life

RUN = "r"


def check(life: Life) -> None:
    """Check everything that must hold at the end of a life. Raises AssertionError."""
    server = life.server
    assert server is not None, "the coordinator is down at the end"
    store = server.store
    _check_rounds(life, store)
    _check_acknowledged(life, store)
    _check_history(life, store)
    assert not files_left(life), f"of a run that is over there still is {files_left(life)}"
    _check_replay(life, store)
    assert not life.loop_errors(), f"errors in callbacks: {life.loop_errors()[:3]}"


def _check_rounds(life: Life, store: Store) -> None:
    """Each round was committed once, from admitted updates of its cohort; each update counts once."""
    commits, job = store.commits(RUN), life.plan.job
    assert [commit.round for commit in commits] == list(range(len(commits))), f"committed rounds: {commits}"
    record = store.runs()[0]
    rounds = record.spec["stop"]["rounds"]
    assert record.state == "stopped" or len(commits) == rounds, f"{len(commits)} of {rounds} rounds, {record.state}"
    last, times = job.exchanges - 1, Counter[str]()
    for commit in commits:
        where = f"round {commit.round}"
        asked = {client for attempt in store.attempts(RUN, commit.round) for client in attempt.cohort}
        for exchange in range(job.exchanges):
            accepted = store.accepted(RUN, commit.round, exchange)
            assert accepted, f"{where}.{exchange} has no accepted list"
            lines = {each.client_id: each for each in store.updates(RUN, commit.round, exchange)}
            clients = [client for client, _ in accepted]
            assert clients == sorted(set(clients), key=str.encode), f"{where}.{exchange}: accepted {clients}"
            assert set(clients) <= asked, f"{where}.{exchange} counts {clients} and asked {asked}"
            for client, digest in accepted:
                line = lines.get(client)
                assert line is not None, f"{where}.{exchange}: {client} counts without a line in the ledger"
                assert line.admitted, f"{where}.{exchange}: {client} was refused and counts"
                assert line.digest == digest, f"{where}.{exchange}: another update of {client} counts than was admitted"
            if exchange == last:
                assert len(clients) == commit.accepted, f"{where}: {commit.accepted} accepted, the list has {clients}"
                times.update(clients)
            if job.cohort:
                missing = {client for client, line in lines.items() if line.admitted} - set(clients)
                assert not missing, f"{where}.{exchange}: updates of {missing} were admitted and do not count"
        assert commit.metrics, f"{where} was never evaluated"
    for device in store.clients():
        counted, listed = device.updates_counted, times[device.client_id]
        assert counted == listed, f"{device.client_id} is in {listed} accepted lists and was counted {counted} times"
    assert [commit.model_digest for commit in commits] == [life.seen.commits.get(n) for n in range(len(commits))], (
        f"the ledger's models {commits} are not those that were committed, {life.seen.commits}"
    )


def _check_acknowledged(life: Life, store: Store) -> None:
    """Every acknowledged update of a committed round is in the ledger, admitted, with the acknowledged digest.

    No receipt says that an admitted update was refused.
    """
    restarted = _rounds_with(life, store, {"round_restarted", "states_restarted", "culprit_dropped"})
    committed = len(store.commits(RUN))
    for (client, round_, exchange), digests in life.seen.acknowledged.items():
        if round_ in restarted or round_ >= committed:
            continue
        assert len(set(digests)) == 1, f"{client} got receipts for several updates of round {round_}: {digests}"
        line = store.update_of(RUN, round_, exchange, client)
        lost = f"the update of {client} in round {round_} was acknowledged and lost"
        assert line is not None, lost
        assert line.admitted, lost
        assert line.digest == digests[-1], f"another update of {client} in round {round_} counts than was acknowledged"
    for (client, round_, exchange), digests in life.seen.refused.items():
        if round_ in restarted or round_ >= committed:
            continue
        line = store.update_of(RUN, round_, exchange, client)
        wrong = line is not None and line.admitted and line.digest in digests
        assert not wrong, f"the update of {client} in round {round_} was admitted, and a receipt says that it was not"


def _rounds_with(life: Life, store: Store, events: set[str]) -> set[int]:
    found = set()
    for entry in store.history(RUN, 10_000):
        if entry.event in events:
            match = re.match(r"round (\d+)", entry.detail)
            found |= {int(match[1])} if match else set(range(100))
    return found


def _check_history(life: Life, store: Store) -> None:
    """The history has each restart, and no acknowledged update was lost."""
    events = [entry.event for entry in store.history(RUN, 10_000)]
    assert "update_dropped" not in events, "an update was acknowledged and its bytes were lost"
    kinds = set(life.seen.happened)
    if not kinds & {"wipe", "operator", "lie", "full"}:
        again = {"round_restarted", "states_restarted"} & set(events)
        assert not again, f"no update could be lost, and yet: {again}"


def files_left(life: Life) -> list[str]:
    """Files of the run in the spool, and updates and states of it on the devices; none are left soon after its end."""
    spool = life.config.state_dir / "spool" / f"run-{RUN}"
    left = [f"spool/{path.relative_to(spool)}" for path in spool.rglob("*") if path.is_file()]
    for name in life.plan.clients:
        for folder in ("pending", "states"):
            paths = (life.folder / name / folder).glob("*")
            left += [f"{name}/{folder}/{path.name}" for path in paths if path.name != "spare.part"]
    return sorted(left)


def _check_replay(life: Life, store: Store) -> None:
    """A replay of the accepted lists gives the same models bit for bit."""
    config = config_of(find_run(store, RUN))
    clients = {name: daemon.local_task(name, life.model) for name in life.plan.clients}
    with Federation(config, load_task(config.task.name, config.task.options), clients) as federation:
        for done in Replay(store, RUN, federation).rounds():
            others = f"; updates of {done.differing} differ" if done.differing else ""
            assert done.same, f"round {done.round}: the replay's model is {done.digest}, not {done.expected}{others}"
