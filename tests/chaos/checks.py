"""What must hold after a seed, whatever happened: each check is an assertion in words."""

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
from fl_client.client_states import ClientStates
from fl_client.shelf import Shelf
from fl_ops.simulate.daemons import load_daemons
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.replay import Replay, config_of, find_run, open_ledger
from fl_server.outcomes import counted_outcome
from fl_server.store.base import Store, UpdateRecord
from fl_server.store.checkpoints import _read
from protos.fl.v1 import admin_pb2
from tasks import load_task
from tests.chaos.arena import Arena
from tests.chaos.jobs import POPULATION
from tests.integration.processes import eventually, write_toml

CLOSE = 1e-5
"""Sums of float32 in another order: part of the largest value by which they may differ."""


@contextmanager
def ledger_of(arena: Arena) -> Iterator[Store]:
    """The coordinator's ledger, to look at while it runs."""
    ledger = open_ledger(_state(arena))
    try:
        yield ledger
    finally:
        ledger.close()


def counted(arena: Arena) -> Counter[str]:
    """Updates that ever counted, by client, as the roster has them."""
    with ledger_of(arena) as ledger:
        return Counter({client.client_id: client.updates_counted for client in ledger.clients()})


def check_ledger(arena: Arena, before: Counter[str]) -> None:
    """Every round is committed once, of admitted updates of its cohort, each of which has counted once.

    before: `counted` from before the run.
    """
    run_id, times = arena.run_id, Counter[str]()
    with ledger_of(arena) as ledger:
        commits = ledger.commits(run_id)
        rounds = config_of(find_run(ledger, run_id)).stop.rounds
        assert [commit.round for commit in commits] == list(range(rounds)), f"committed rounds: {commits}"
        for commit in commits:
            accepted = ledger.accepted(run_id, commit.round, 0) or []
            lines = {update.client_id: update for update in ledger.updates(run_id, commit.round, 0)}
            asked = {client for attempt in ledger.attempts(run_id, commit.round) for client in attempt.cohort}
            clients = [client for client, _ in accepted]
            where = f"round {commit.round}"
            assert len(clients) == len(set(clients)) == commit.accepted, f"{where} counts one twice: {clients}"
            assert set(clients) <= asked, f"{where} counts {clients} and asked {asked}"
            for client, digest in accepted:
                assert client in lines, f"{where}: {client} counts without a line in the ledger"
                assert lines[client].admitted, f"{where}: {client} was refused and counts"
                assert lines[client].digest == digest, f"{where}: another update of {client} counts than was admitted"
            assert commit.metrics, f"{where} was never evaluated"
            times.update(clients)
    for client in arena.daemons:
        now = counted(arena)[client] - before[client]
        assert now == times[client], f"{client} is in {times[client]} accepted lists, and was counted {now} times"


def check_undisturbed(digests: list[str], undisturbed: list[str]) -> None:
    """No update was taken away: every model is that of the undisturbed run."""
    for round_, (digest, expected) in enumerate(zip(digests, undisturbed, strict=False)):
        assert digest == expected, f"round {round_}: the undisturbed run's model is {expected}, this one's {digest}"


def check_replay(arena: Arena) -> None:
    """The accepted lists, done again in this process, make the same models bit for bit."""
    folder = arena.place.folder / "replay"
    folder.mkdir(exist_ok=True)
    for daemon in arena.daemons.values():
        task = {**daemon.settings["task"], "options": {"model": "broad"}}
        write_toml(folder / daemon.config.name, {**daemon.settings, "task": task})
    with ledger_of(arena) as ledger:
        config = config_of(find_run(ledger, arena.run_id))
        clients = load_daemons(folder, config.task.name)
        with Federation(config, load_task(config.task.name, config.task.options), clients) as federation:
            for done in Replay(ledger, arena.run_id, federation).rounds():
                whose = f"; other updates than theirs came of {done.differing}" if done.differing else ""
                assert done.same, f"round {done.round}: the replay's model is {done.digest}, not {done.expected}{whose}"


def check_history(arena: Arena, restarts: int, *, takes_away: bool) -> None:
    """`fl run history` tells of every restart under the run. Nothing that was acknowledged was lost on the way."""
    events = arena.server.history(arena.run_id)
    told = events.count("run_recovered")
    assert told >= restarts, f"the coordinator was started {restarts} times under the run, its history tells of {told}"
    assert "update_dropped" not in events, "an update was acknowledged, and then its bytes were not there"
    again = {"round_restarted", "states_restarted"} & set(events)
    assert takes_away or not again, f"all updates could come, and yet: {again}"


def check_rounds_removed(arena: Arena) -> None:
    """In a run under way nothing is left of earlier rounds but the latest, which may be under removal."""
    done = arena.server.run(arena.run_id).rounds_done
    kept = [path.name for path in _spool(arena).glob("round-*") if int(path.name.removeprefix("round-")) < done - 1]
    assert not kept, f"{done} rounds are committed, and of these there is still something in the spool: {kept}"


def check_spool(arena: Arena) -> None:
    """Nothing is left of an ended run's updates, whole or not."""
    folder = _spool(arena)
    eventually(lambda: not folder.exists(), f"the spool lets go of {sorted(folder.rglob('*'))}", 10.0)


def check_alive(arena: Arena) -> None:
    """Coordinator and daemons run and see each other, and no thread or task has died of an exception."""
    arena.attend()
    for process in (arena.server, *arena.daemons.values()):
        assert process.exit_code is None, f"{process.name} has ended with {process.exit_code}"
        assert "Traceback" not in process.errors(), f"{process.name} says: {process.errors()[-1500:]}"


def check_states(arena: Arena) -> bool:
    """c is the mean of all c_i, between two rounds of a paused run; False where nothing has counted yet."""
    run_id = arena.run_id
    with ledger_of(arena) as ledger:
        epoch = find_run(ledger, run_id).state_epoch
        latest: dict[str, UpdateRecord] = {}
        commits = [commit for commit in ledger.commits(run_id) if commit.state_epoch == epoch]
        for commit in commits:
            fixed = {client for client, _ in ledger.accepted(run_id, commit.round, 0) or []}
            latest |= {each.client_id: each for each in ledger.updates(run_id, commit.round, 0)
                       if each.client_id in fixed}  # fmt: skip
    if not latest:
        return False
    c = _read(_state(arena) / "checkpoints" / f"run-{run_id}" / f"round-{commits[-1].round:06d}").memory["c"]
    kept = [_kept(arena, update, epoch) for update in latest.values()]
    mean = {name: sum(state[name].double() for state in kept) / POPULATION for name in c}
    largest = max(float(value.abs().max()) for value in c.values())
    apart = max(float((c[name].double() - torch.as_tensor(mean[name])).abs().max()) for name in c)
    assert largest > 0, "c is zero although updates have counted"
    assert apart <= CLOSE * largest, f"c and the mean of the c_i are {apart:g} apart, with values up to {largest:g}"
    return True


def _kept(arena: Arena, update: UpdateRecord, epoch: int) -> Tensors:
    """c_i as the client's next work would begin from it: with the outcome of its last update that counted."""
    state_dir = Path(arena.daemons[update.client_id].settings["state_dir"])
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        eventually(lambda: _copied(state_dir, copy), f"{update.client_id} lets its files be copied")
        Shelf(copy / "pending", copy / "states").settle(counted_outcome(update, epoch))
        state = ClientStates(copy / "states").find(update.run_id)
    whose = f"{update.client_id}, whose update of round {update.round} counted,"
    assert state is not None, f"{whose} has no client state"
    assert state.left_by.digest.value == update.digest, f"{whose} has the state of round {state.left_by.key.round}"
    return tree.map(lambda value: value, state.memory["c_i"])


def _copied(state_dir: Path, copy: Path) -> bool:
    """Copy what a daemon keeps; False when it renamed or removed a file meanwhile, as it does with an outcome."""
    try:
        for folder in ("pending", "states"):
            shutil.rmtree(copy / folder, ignore_errors=True)
            shutil.copytree(state_dir / folder, copy / folder)
    except (shutil.Error, FileNotFoundError):
        return False
    return True


def check_completed(run: admin_pb2.RunStatus) -> None:
    """The run has come to its proper end."""
    assert run.state == admin_pb2.RUN_STATE_COMPLETED, f"the run has ended otherwise: {run.reason}"


def _state(arena: Arena) -> Path:
    return Path(arena.server.settings["state_dir"])


def _spool(arena: Arena) -> Path:
    return _state(arena) / "spool" / f"run-{arena.run_id}"
