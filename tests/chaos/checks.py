"""Conditions that hold after every seed, each as an assertion with a message."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from algorithms import tree
from algorithms.base import Tensors
from fl_client.storage.client_state_store import ClientStateStore
from fl_client.storage.device_storage import DeviceStorage
from fl_ops.simulate.daemons import load_daemons
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.replay import config_of, find_run, open_ledger, replay_of
from fl_server.run.client_states import counted_outcome
from fl_server.store.checkpoints import _read
from fl_server.store.database.store import Store
from fl_server.store.records import UpdateRecord
from fl_tasks import load_task
from protos.fl.v1 import admin_pb2
from tests.chaos.cluster import ChaosCluster
from tests.chaos.jobs import MAX_STALENESS, POPULATION
from tests.processes.process import eventually, write_toml

CLOSE = 1e-5
"""Largest difference of float32 sums in different order, as a share of the largest value."""


@contextmanager
def ledger_of(cluster: ChaosCluster) -> Iterator[Store]:
    """The ledger of the running coordinator, for reading."""
    ledger = open_ledger(_state(cluster))
    try:
        yield ledger
    finally:
        ledger.close()


def counted(cluster: ChaosCluster) -> Counter[str]:
    """Number of counted updates of each client so far, from the ledger."""
    with ledger_of(cluster) as ledger:
        return Counter({client.client_id: client.updates_counted for client in ledger.clients()})


def check_ledger(cluster: ChaosCluster, before: Counter[str]) -> None:
    """Check that every round was committed once, from admitted updates of its cohort that each counted once.

    before: the result of `counted` before the run.
    """
    run_id, times, counted_before = cluster.run_id, Counter[str](), set[tuple[str, int]]()
    with ledger_of(cluster) as ledger:
        commits = ledger.commits(run_id)
        rounds = config_of(find_run(ledger, run_id)).stop.rounds
        assert [commit.round for commit in commits] == list(range(rounds)), f"committed rounds: {commits}"
        for commit in commits:
            taken = ledger.taken(run_id, commit.round) or []
            where = f"round {commit.round}"
            oldest = commit.round - (MAX_STALENESS if cluster.job.buffered else 0)
            assert len(taken) == len(set(taken)) == commit.accepted, f"{where} counts one twice: {taken}"
            for client, version, digest in taken:
                asked = {client for attempt in ledger.attempts(run_id, version) for client in attempt.cohort}
                line = ledger.update_of(run_id, version, 0, client)
                assert oldest <= version <= commit.round, f"{where} counts an update of {client} from version {version}"
                assert client in asked, f"{where} counts {client} with version {version}, which {asked} had"
                assert line is not None, f"{where}: {client} counts without a line in the ledger"
                assert line.admitted, f"{where}: {client} was refused and counts"
                assert line.digest == digest, f"{where}: another update of {client} counts than was admitted"
                assert (client, version) not in counted_before, f"{where}: {client} counts again with version {version}"
                counted_before.add((client, version))
            assert commit.metrics, f"{where} was never evaluated"
            times.update(client for client, _, _ in taken)
    for client in cluster.daemons:
        now = counted(cluster)[client] - before[client]
        assert now == times[client], f"{client} is in {times[client]} accepted lists, and was counted {now} times"


def check_undisturbed(digests: list[str], undisturbed: list[str]) -> None:
    """Check that every model equals that of the undisturbed run, because no update was lost."""
    for round_, (digest, expected) in enumerate(zip(digests, undisturbed, strict=False)):
        assert digest == expected, f"round {round_}: the undisturbed run's model is {expected}, this one's {digest}"


def check_replay(cluster: ChaosCluster) -> None:
    """Check that a replay of the accepted lists in this process gives the same models bit for bit."""
    folder = cluster.workspace.folder / "replay"
    folder.mkdir(exist_ok=True)
    for daemon in cluster.daemons.values():
        task = {**daemon.settings["task"], "options": {"model": "broad"}}
        write_toml(folder / daemon.config.name, {**daemon.settings, "task": task})
    with ledger_of(cluster) as ledger:
        config = config_of(find_run(ledger, cluster.run_id))
        clients = load_daemons(folder, config.task.name)
        with Federation(config, load_task(config.task.name, config.task.options), clients) as federation:
            for done in replay_of(ledger, cluster.run_id, federation).rounds():
                others = f"; updates of {done.differing} differ" if done.differing else ""
                assert done.same, (
                    f"round {done.round}: the replay's model is {done.digest}, not {done.expected}{others}"
                )


def check_history(cluster: ChaosCluster, restarts: int, *, may_lose_update: bool) -> None:
    """Check that `fl run history` has every restart during the run, and that no acknowledged update was lost."""
    events = cluster.server.history(cluster.run_id)
    recorded = events.count("run_recovered")
    assert recorded >= restarts, f"the coordinator was restarted {restarts} times, the history has {recorded}"
    assert "update_dropped" not in events, "an update was acknowledged and its bytes were lost"
    again = {"round_restarted", "states_restarted"} & set(events)
    assert may_lose_update or not again, f"no update could be lost, and yet: {again}"


def check_rounds_removed(cluster: ChaosCluster) -> None:
    """Check that the spool has no updates of earlier rounds except the latest, which may be under removal.

    With a buffer, of versions that cannot be in use any more.
    """
    done = cluster.server.run(cluster.run_id).rounds_done - (MAX_STALENESS if cluster.job.buffered else 0)
    kept = [path.name for path in _spool(cluster).glob("round-*") if int(path.name.removeprefix("round-")) < done - 1]
    assert not kept, f"{done} rounds are committed, and the spool still has {kept}"


def check_spool(cluster: ChaosCluster) -> None:
    """Check that the spool has nothing of an ended run."""
    folder = _spool(cluster)
    eventually(lambda: not folder.exists(), f"the spool removes {sorted(folder.rglob('*'))}", 10.0)


def check_alive(cluster: ChaosCluster) -> None:
    """Check that coordinator and daemons run and are connected, and that no thread or task raised an exception."""
    cluster.until_all_present()
    for process in (cluster.server, *cluster.daemons.values()):
        assert process.exit_code is None, f"{process.name} has ended with {process.exit_code}"
        assert "Traceback" not in process.errors(), f"the log of {process.name} has: {process.errors()[-1500:]}"


def check_states(cluster: ChaosCluster) -> bool:
    """Check between two rounds of a paused run that c is the mean of all c_i; False if no update has counted yet."""
    run_id = cluster.run_id
    with ledger_of(cluster) as ledger:
        epoch = find_run(ledger, run_id).state_epoch
        latest: dict[str, UpdateRecord] = {}
        commits = [commit for commit in ledger.commits(run_id) if commit.state_epoch == epoch]
        for commit in commits:
            fixed = {client for client, _ in ledger.accepted(run_id, commit.round, 0) or []}
            latest |= {each.client_id: each for each in ledger.updates(run_id, commit.round, 0)
                       if each.client_id in fixed}  # fmt: skip
    if not latest:
        return False
    c = _read(_state(cluster) / "checkpoints" / f"run-{run_id}" / f"round-{commits[-1].round:06d}").memory["c"]
    kept = [_kept(cluster, update, epoch) for update in latest.values()]
    mean = {name: sum(state[name].double() for state in kept) / POPULATION for name in c}
    largest = max(float(value.abs().max()) for value in c.values())
    apart = max(float((c[name].double() - torch.as_tensor(mean[name])).abs().max()) for name in c)
    assert largest > 0, "c is zero although updates have counted"
    assert apart <= CLOSE * largest, f"c and the mean of the c_i are {apart:g} apart, with values up to {largest:g}"
    return True


def _kept(cluster: ChaosCluster, update: UpdateRecord, epoch: int) -> Tensors:
    """The c_i with which the client would start its next work, after the outcome of its last counted update."""
    state_dir = Path(cluster.daemons[update.client_id].settings["state_dir"])
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        eventually(lambda: _copied(state_dir, copy), f"the files of {update.client_id} are copied")
        DeviceStorage(copy / "pending", copy / "states").settle(counted_outcome(update, epoch))
        state = ClientStateStore(copy / "states").find(update.run_id)
    client = f"{update.client_id} with a counted update of round {update.round}"
    assert state is not None, f"{client} has no client state"
    assert state.created_by.digest.value == update.digest, (
        f"{client} has the state of round {state.created_by.key.round}"
    )
    return tree.map(lambda value: value, state.memory["c_i"])


def _copied(state_dir: Path, copy: Path) -> bool:
    """Copy a daemon's state; False if the daemon renamed or removed a file during the copy."""
    try:
        for folder in ("pending", "states"):
            shutil.rmtree(copy / folder, ignore_errors=True)
            shutil.copytree(state_dir / folder, copy / folder)
    except (shutil.Error, FileNotFoundError):
        return False
    return True


def check_completed(run: admin_pb2.RunStatus) -> None:
    """Check that the run is completed."""
    assert run.state == admin_pb2.RUN_STATE_COMPLETED, f"the run has ended otherwise: {run.reason}"


def _state(cluster: ChaosCluster) -> Path:
    return Path(cluster.server.settings["state_dir"])


def _spool(cluster: ChaosCluster) -> Path:
    return _state(cluster) / "spool" / f"run-{cluster.run_id}"
