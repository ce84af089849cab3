"""A coordinator that dies behind any of its writes, and the one that is started after it."""

from __future__ import annotations

import asyncio

import pytest

from fl_server.errors import UploadBroken
from fl_server.events import DeadlinePassed
from fl_server.round_state import Phase
from fl_server.spool import SpoolKey
from fl_server.views import run_status
from protos.codec import pack, unpack
from protos.fl.v1.training_pb2 import REFUSAL_REASON_LEFT_OUT, REFUSAL_REASON_NOT_FINITE
from tests.fl_server.devices import Device, announced, stream, upload, work_of
from tests.fl_server.harness import Journal, World, until

NAMES = ("a", "b", "c")
REGISTERING = ["put_clients"] * 6
ROUND = ["open_attempt", "seal", "record_update", "seal", "record_update", "fix_accepted", "save", "commit"]
RUN = sorted([*REGISTERING, "save", "create_run", *2 * ROUND, *2 * ["set_metrics", "update_run"]])
"""All that is written for two rounds; an evaluation is written beside the next round."""


async def a_run(world, devices, **sections):
    """The fleet comes, and a run is made unless it is there."""
    for device in devices:
        await device.come(world)
    if not world.coordinator.runs():
        await world.create(**sections)
    return await world.completed()


async def lived(folder, dies_at=None, **sections):
    """What a run was when its coordinator died once: digests, metrics, accepted lists; and its devices."""
    devices = [Device(name) for name in NAMES]
    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(a_run(world, devices, **sections))
            await until(lambda: world.journal.dead, "it dies, and has not written all before")
        devices[0].kept.clear()
    async with World(folder) as world:
        digests = await a_run(world, devices, **sections)
        run = world.coordinator.run("r")
        await until(lambda: all(commit.metrics for commit in run.log.commits.values()), "it is evaluated")
        metrics = [commit.metrics for commit in run.log.commits.values()]
        accepted = [world.store.accepted("r", round_, 0) for round_ in range(len(digests))]
        assert [commit.model_digest for commit in world.store.commits("r")] == digests
        return (digests, metrics, accepted), devices, world.journal.writes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the run is when nothing happens to it, and what was written."""
    outcome, _, writes = asyncio.run(lived(tmp_path_factory.mktemp("undisturbed")))
    return outcome, writes


def test_what_is_written_for_a_run(undisturbed):
    """Each round writes cohort, updates, list, checkpoint and commit, in that order, and nothing else.

    The updates of two devices may cross.
    """
    _, writes = undisturbed
    assert sorted(writes) == RUN
    rounds = [name for name in writes[len(REGISTERING) + 2 :] if name not in {"set_metrics", "update_run"}]
    for first in (0, len(ROUND)):
        assert [rounds[first], *sorted(rounds[first + 1 : first + 5]), *rounds[first + 5 : first + 8]] == [
            "open_attempt", "record_update", "record_update", "seal", "seal", "fix_accepted", "save", "commit",
        ]  # fmt: skip


@pytest.mark.parametrize("dies_at", range(len(REGISTERING) + 1, len(RUN) + 1))
async def test_death_behind_any_write_changes_no_bit(tmp_path, undisturbed, dies_at):
    """The same models, metrics and accepted lists; also though a device lost what it had computed.

    Every device that was counted has heard so, with the digest of what it sent.
    """
    outcome, devices, _ = await lived(tmp_path, dies_at)
    assert outcome == undisturbed[0]
    for round_, accepted in enumerate(outcome[2]):
        for client, digest in accepted:
            heard = devices[NAMES.index(client)].outcomes.get(("r", round_, 0))
            assert heard is None or (heard.counted and heard.digest.value == digest)


async def test_the_history_tells_of_a_restart(tmp_path):
    """Behind the second of two updates: the line says where the run went on, once for each restart."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path, Journal("fix_accepted")) as world:
        world.spawn(a_run(world, devices))
        await until(lambda: world.journal.dead, "it dies")
    async with World(tmp_path) as world:
        await a_run(world, devices)
        told = [entry.detail for entry in world.store.history("r") if entry.event == "run_recovered"]
        assert told == ["round 0: 2 updates of 2 clients are here"]


async def test_a_target_reached_before_the_death_ends_the_run(tmp_path):
    """The evaluation is in the ledger, the end is not: no round more is made than in the undisturbed run."""
    sections = {"stop": {"rounds": 5, "metric": "accuracy", "target": 0.01}}
    undisturbed, _, _ = await lived(tmp_path / "undisturbed", **sections)
    disturbed, _, _ = await lived(tmp_path / "disturbed", "set_metrics", **sections)
    assert disturbed == undisturbed
    assert len(disturbed[0]) == 1


async def refused(world, device):
    """The device sends a NaN, and is told that it will never count."""
    assignment = await device.assigned()
    _, data = await device.update(world, assignment)
    layout = world.coordinator.run("r").model.engine.layout
    header, data = announced(assignment, layout, b"\xff" * 4 + data[4:])
    answer = await world.service.SubmitUpdate(stream(*upload(header, data, device.session)), None)
    assert answer.receipt.reason == REFUSAL_REASON_NOT_FINITE
    return header, data


async def test_who_was_refused_before_the_death_is_not_waited_for(tmp_path):
    """The quorum has delivered and the third was refused: the round closes at once, and not at its deadline."""
    devices = [Device(name, works=False) for name in NAMES]
    three = {"round": {"clients_per_round": 3, "quorum": 2}, "stop": {"rounds": 1}}
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        await world.create(**three)
        await refused(world, devices[0])
    for device in devices[1:]:
        device.works = True
    async with World(tmp_path) as world:
        assert len(await a_run(world, devices)) == 1
        assert devices[0].outcomes["r", 0, 0].counted is False


@pytest.mark.parametrize("dies", [False, True])
async def test_bytes_are_those_of_the_undisturbed_round(tmp_path, dies):
    """Of three, one delivers before the death, one has fetched and sent a part by then, and one does all after it."""
    a, b, c = devices = [Device(name, works=False) for name in NAMES]
    world = await World(tmp_path).__aenter__()
    for device in devices:
        await device.come(world)
    run = await world.create(round={"clients_per_round": 3}, stop={"rounds": 1})
    each = sum(sent.resource.size_bytes for sent in run.model.broadcasts)
    await a.contribute(world, await a.assigned())
    header, data = await b.update(world, await b.assigned())
    with pytest.raises(UploadBroken):
        await world.service.SubmitUpdate(stream(*list(upload(header, data, b.session))[:3]), None)
    if dies:
        world.journal.dead = True
        await world.__aexit__()
        world = await World(tmp_path).__aenter__()
        for device in devices:
            await device.come(world)
    await b.contribute(world, await b.assigned())
    await c.contribute(world, await c.assigned())
    await world.completed()
    (commit,) = world.store.commits("r")
    await world.__aexit__()
    assert (commit.bytes_down, commit.bytes_up) == (3 * each, 3 * len(data))


async def test_a_repeat_gets_the_first_answer_for_ever(tmp_path):
    """Admitted or refused, before and after a death, and once the round is committed, word for word."""
    devices = a, b, c = [Device(name, works=False) for name in NAMES]
    assignment, first = None, {}

    async def again(world, device):
        header, data = await device.update(world, assignment)
        return (await world.service.SubmitUpdate(stream(*upload(header, data, device.session)), None)).receipt

    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        await world.create(round={"clients_per_round": 3, "quorum": 2}, stop={"rounds": 1})
        assignment = await a.assigned()
        await refused(world, b)
        first = {"a": await again(world, a), "b": await again(world, b)}
        assert (first["a"].admitted, first["b"].admitted) == (True, False)
        world.journal.dead = True
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        assert {"a": await again(world, a), "b": await again(world, b)} == first
        await again(world, c)
        await world.completed()
        assert {"a": await again(world, a), "b": await again(world, b)} == first
        assert world.metric("fl_update_conflicts_total", run="r") == 2
        assert world.store.commits("r")[0].accepted == 2


async def test_who_was_refused_is_not_waited_for_when_it_attaches_again(tmp_path):
    """The refusal stands for the round, whatever becomes of the connection."""
    a, b = Device("a", works=False), Device("b", works=False)
    async with World(tmp_path) as world:
        await a.come(world)
        await b.come(world)
        run = await world.create(round={"clients_per_round": 2, "quorum": 1}, stop={"rounds": 1})
        await refused(world, a)
        await a.leave()
        await a.come(world)
        b.works = True
        await b.contribute(world, await b.assigned())
        assert len(await world.completed()) == 1
        assert run.log.commits[0].accepted == 1


@pytest.mark.parametrize("dies_at", [None, "save", "commit"])
async def test_who_was_left_out_by_krum_is_told_so(tmp_path, dies_at):
    """Five deliver and two are kept: the liar hears it, also after a death between checkpoint and outcomes.

    The coordinator may die behind the checkpoint, or behind the ledger's line on it. Receipts stay what they were.
    """
    devices = [Device(name, works=name != "c") for name in "abcde"]
    krum = {"clients_per_round": 5, "quorum": 5, "reducer": "krum", "krum_keep": 2}
    sections = {"round": krum, "stop": {"rounds": 1}}
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        await world.create(**sections)
        if dies_at is not None:  # not at the first model's
            world.journal.dies_at = dies_at
        await poison(world, devices[2])
        await until(lambda: world.journal.dead or world.coordinator.run("r").ended, "it dies or completes")
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        await world.completed()
        await until(lambda: len(devices[2].outcomes) == 1, "the liar is told")
        outcomes = [device.outcomes["r", 0, 0] for device in devices]
        assert [outcome.counted for outcome in outcomes].count(True) == 2
        told = outcomes[2]
        assert (told.counted, told.reason, told.digest) == (
            False,
            REFUSAL_REASON_LEFT_OUT,
            devices[2].kept["r", 0, 0][1].digest,
        )
        assert [record.updates_counted for record in world.store.clients()] == [int(each.counted) for each in outcomes]
        assert await devices[2].contribute(world, await devices[2].assigned()) == devices[2].receipts[0]


async def poison(world, device):
    """The device sends the model's hundredfold as its update."""
    assignment = await device.assigned()
    _, data = await device.update(world, assignment)
    layout = world.coordinator.run("r").model.engine.layout
    values = {name: 100 + value for name, value in unpack(data, layout).items()}
    device.kept["r", 0, 0] = (work_of(assignment), *announced(assignment, layout, bytes(pack(values, layout))))
    await device.contribute(world, assignment)


async def test_a_completed_run_can_be_extended_after_a_restart(tmp_path):
    """It goes on from where it ended, and its next round takes updates."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path) as world:
        first = await a_run(world, devices)
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        run = world.coordinator.run("r")
        await world.coordinator.extend(run, 1, 0.0, "admin")
        await until(lambda: len(run.log.commits) == 3, "the added round is committed")
        digests = await world.completed()
        assert digests[:2] == first


@pytest.mark.parametrize("damage", ["torn", "short", "gone"])
async def test_an_update_whose_bytes_are_damaged_is_asked_for_again(tmp_path, undisturbed, damage):
    """The ledger's line is dropped and the device sends the same bytes; the model is as if nothing had been."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
            device.works = False
        run = await world.create()
        quick = devices[NAMES.index(await until(lambda: min(run.state.drawn, default=""), "a round is drawn"))]
        receipt = await quick.contribute(world, await quick.assigned())
        path = world.parts.spool.path(SpoolKey("r", 0, 0, quick.name), receipt.digest.value)
        whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:100] if damage == "short" else b"\0" * 8 + whole[8:])
    for device in devices:
        device.works = True
    async with World(tmp_path) as world:
        assert await a_run(world, devices) == undisturbed[0][0]
        assert [entry.event for entry in world.store.history("r")].count("update_dropped") == 1


async def a_fixed_list_with_a_torn_update(folder, devices):
    """The coordinator died when it had fixed round 0's list; then the power tore one of its updates. Whose it was."""
    async with World(folder, Journal("fix_accepted")) as world:
        world.spawn(a_run(world, devices))
        await until(lambda: world.journal.dead, "it dies")
        client, digest = world.store.accepted("r", 0, 0)[0]
    world.parts.spool._inner.path(SpoolKey("r", 0, 0, client), digest).write_bytes(b"torn")
    return devices[NAMES.index(client)]


async def test_a_fixed_list_is_made_whole_by_its_client(tmp_path, undisturbed):
    """It sends the same bytes again, and the models are as if nothing had been."""
    devices = [Device(name) for name in NAMES]
    await a_fixed_list_with_a_torn_update(tmp_path, devices)
    async with World(tmp_path) as world:
        assert await a_run(world, devices) == undisturbed[0][0]
        assert "round_restarted" not in [entry.event for entry in world.store.history("r")]


async def test_a_fixed_list_that_stays_torn_restarts_the_round(tmp_path):
    """Its client is gone for good: the round is drawn anew, with a line in the history, and the run is completed."""
    devices = [Device(name) for name in NAMES]
    torn = await a_fixed_list_with_a_torn_update(tmp_path, devices)
    others = [device for device in devices if device is not torn]
    async with World(tmp_path, reattach_grace_s=0.3) as world:
        assert len(await a_run(world, others)) == 2
        (told,) = [entry for entry in world.store.history("r") if entry.event == "round_restarted"]
        assert told.detail == "round 0: the bytes of 1 of its 2 accepted updates are lost, and did not come again"
        assert {client for client, _ in world.store.accepted("r", 0, 0)} == {device.name for device in others}


async def test_a_fixed_list_that_is_torn_at_the_deadline_restarts_the_round(tmp_path):
    """Its client is here and silent: the list is forgotten, and nobody's update of it is left in the ledger."""
    devices = [Device(name) for name in NAMES]
    torn = await a_fixed_list_with_a_torn_update(tmp_path, devices)
    torn.works = False
    async with World(tmp_path) as world:
        await torn.come(world)
        run = world.coordinator.run("r")
        run.post(DeadlinePassed())
        await until(lambda: run.state.attempt and world.store.accepted("r", 0, 0) is None, "the round is drawn anew")
        assert world.store.updates("r", 0, 0) == []


async def test_an_over_selecting_run_keeps_what_it_learned(tmp_path):
    """The factor after a committed round is in the ledger: 1.5 + 0.2 * (1.1 - 1.5) = 1.42 with nobody dropped out."""
    devices = [Device(name) for name in NAMES]
    over = {"round": {"clients_per_round": 2, "close": "goal", "over_selection": 1.5, "min_clients": 3}}
    async with World(tmp_path) as world:
        await a_run(world, devices, **over, stop={"rounds": 1})
        assert world.metric("fl_over_selection", run="r") == pytest.approx(1.42)
    async with World(tmp_path) as world:
        run = world.coordinator.run("r")
        assert run_status(run).over_selection == pytest.approx(1.42)
        assert run.state.over_selection == pytest.approx(1.42)
        assert run.state.over_selection == run.log.commits[0].over_selection


async def test_an_end_that_was_cut_short_is_finished_at_the_next_start(tmp_path):
    """The run is stopped in the ledger, its open round not yet given up: nothing of that round stays behind."""
    devices = [Device(name, works=False) for name in NAMES[:2]]
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        run = await world.create()
        await devices[0].contribute(world, await devices[0].assigned())
        world.journal.dies_at = "update_run"
        stopping = world.spawn(world.coordinator.stop(run, "", "admin"))
        await until(lambda: world.journal.dead, "it dies")
        await asyncio.gather(stopping, return_exceptions=True)
        assert len(world.store.updates("r", 0, 0)) == 1
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").status == "stopped"
        assert (world.store.updates("r", 0, 0), world.parts.spool.sweep()) == ([], [])


async def test_a_paused_run_is_paused_after_a_restart(tmp_path):
    """Its open round goes on, and no other is drawn."""
    devices = [Device(name, works=False) for name in NAMES[:2]]
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        run = await world.create()
        await devices[0].assigned()
        await world.coordinator.pause(run, "admin")
    async with World(tmp_path) as world:
        for device in devices:
            device.works = True
            await device.come(world)
        run = world.coordinator.run("r")
        await until(lambda: len(run.log.commits) == 1, "the open round is committed")
        await until(lambda: run.state.phase is Phase.SELECTING, "it is between two rounds")
        assert (run.status, run.state.drawn) == ("paused", frozenset())
