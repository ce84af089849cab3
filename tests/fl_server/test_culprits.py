"""Updates that spoil a round: dropped, refused or out-weighed, whatever exchange they come in, and over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from fl_server.errors import InvalidInput, WrongState
from fl_server.norms import NormHistory
from fl_server.run_config import from_stored
from protos.codec import Layout, digest_message, digest_of, pack, unpack
from protos.fl.v1.training_pb2 import PAYLOAD_KIND_DELTA, PAYLOAD_KIND_FULL_GRADIENT, UpdateHeader
from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until

LARGEST = float(torch.finfo(torch.float32).max)
PLAIN = {"model": "plain"}
THREE = {"clients_per_round": 3, "min_clients": 3}


@dataclass
class Liar(Device):
    """Sends what `lie` makes of its update in the rounds that it lies in."""

    lie: Callable[[int, dict], None] = lambda kind, values: None
    lies_in: range = range(100)
    exchange: int = 0

    async def update(self, world, assignment):
        """Changed, with a header that fits."""
        header, data = await super().update(world, assignment)
        if assignment.key.round not in self.lies_in or assignment.key.exchange != self.exchange:
            return header, data
        parts, at = [], 0
        for payload in header.payloads:
            layout = Layout.from_manifest(payload.manifest, 1 << 30)
            values = {name: each.clone() for name, each in unpack(data[at : at + layout.size_bytes], layout).items()}
            self.lie(payload.kind, values)
            parts.append(bytes(pack(values, layout)))
            at += layout.size_bytes
        changed = UpdateHeader()
        changed.CopyFrom(header)
        changed.digest.CopyFrom(digest_message(digest_of(b"".join(parts))))
        return changed, b"".join(parts)


def huge(value, wanted=PAYLOAD_KIND_DELTA):
    """All that is trained is this value in one payload."""

    def lie(kind, values):
        for name, each in values.items():
            if kind == wanted and "running" not in name and each.is_floating_point():
                each.fill_(value)

    return lie


async def lived(folder, devices, dies_at=None, **sections):
    """Digests of a run whose coordinator may die once; its accepted lists, history, and the writes."""

    async def a_run(world):
        for device in devices:
            await device.come(world)
        if not world.coordinator.runs():
            await world.create(**sections)
        return await world.completed()

    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(a_run(world))
            await until(lambda: world.journal.dead, "it dies")
    async with World(folder) as world:
        digests = await a_run(world)
        lists = [[client for client, _ in world.store.accepted("r", each, 0)] for each in range(len(digests))]
        return digests, lists, [entry.event for entry in world.store.history("r")], world.journal.writes


@pytest.mark.parametrize("limits", [{}, {"max_relative_norm": 0.0, "max_relative_payload": 0.0}])
@pytest.mark.parametrize("dies_at", [None, "fix_accepted", "refuse_accepted"])
async def test_an_update_that_overflows_the_sum_is_dropped_and_the_round_repeated(tmp_path, limits, dies_at):
    """With limits by its length beside the others', without by what it does; a death in between changes no bit."""
    round_ = {**THREE, "quorum": 2, **limits}
    sections = {"algorithm": {"name": "fedavg", "parameters": {"eta_g": 10.0}}, "round": round_, "stop": {"rounds": 2}}
    devices = [Liar("a", lie=huge(LARGEST)), Device("b"), Device("c")]
    digests, lists, history, _ = await lived(tmp_path, devices, dies_at, **sections)
    assert (len(digests), lists) == (2, [["b", "c"], ["b", "c"]])
    assert history.count("culprit_dropped") == 2
    assert {outcome.counted for outcome in devices[0].outcomes.values()} == {False}


async def test_who_is_alone_in_a_round_is_replaced(tmp_path):
    """A round of one: there is nobody to compare with, and no training leaves an update so long."""
    devices = [Liar("a", lie=huge(LARGEST)), Device("b"), Device("c")]
    sections = {"algorithm": {"name": "fedavg", "parameters": {"eta_g": 10.0}}, "stop": {"rounds": 4}}
    one = {"clients_per_round": 1, "min_clients": 3}
    digests, lists, history, _ = await lived(tmp_path, devices, round=one, **sections)
    assert len(digests) == 4
    assert "a" not in {client for clients in lists for client in clients}
    assert "culprit_dropped" in history


async def test_from_the_third_round_on_a_longer_update_is_refused(tmp_path):
    """A thousand times the others' norm: admitted by nobody, refused with the key's name, and the run goes on."""
    devices = [Liar("a", lie=huge(30.0), lies_in=range(3, 4)), Device("b"), Device("c")]
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        await world.create(round={**THREE, "quorum": 2}, stop={"rounds": 5})
        await world.completed()
        refused = [receipt for receipt in devices[0].receipts if not receipt.admitted]
        assert [receipt.key.round for receipt in refused] == [3]
        assert "100 times the median of those that counted" in refused[0].detail
        assert [commit.accepted for commit in world.store.commits("r")] == [3, 3, 3, 2, 3]


@pytest.mark.parametrize(
    ("method", "exchange", "round_"),
    [("mime", 0, 0), ("mime", 0, 3), ("mimelite", 0, 0), ("mimelite", 0, 3)],
)
async def test_a_gradient_is_limited_beside_gradients(tmp_path, method, exchange, round_):
    """In the first rounds beside the others of the exchange, later beside committed ones; its delta is as it should."""
    lie = huge(1e20, PAYLOAD_KIND_FULL_GRADIENT)
    devices = [Liar("a", lie=lie, lies_in=range(round_, round_ + 1), exchange=exchange), Device("b"), Device("c")]
    sections = {"algorithm": {"name": method}, "round": {**THREE, "quorum": 2}, "stop": {"rounds": round_ + 1}}
    digests, lists, history, _ = await lived(tmp_path, devices, **sections)
    assert lists == [["a", "b", "c"]] * round_ + [["b", "c"]]
    assert ("culprit_dropped" in history) is (round_ < 3)
    assert len(digests) == round_ + 1


async def test_norms_of_every_vector_are_in_the_ledger_and_read_back(tmp_path):
    """Payloads and buffers of all exchanges; what a restart reads is what the coordinator had."""
    async with World(tmp_path) as world:
        for name in "abc":
            await Device(name).come(world)
        run = await world.create(algorithm={"name": "mime"}, round=THREE, stop={"rounds": 3})
        await world.completed()
        assert set(world.store.updates("r", 0, 0)[0].norms) == {"full_gradient"}
        assert set(world.store.updates("r", 0, 1)[0].norms) == {"delta", "buffers"}
        again = NormHistory()
        again.read_back(world.store, world.store.commits("r"))
        section = run.config.round
        assert (again.limit(section), again.others(section)) == (run.norms.limit(section), run.norms.others(section))
        assert set(again.others(section)) == {"full_gradient", "buffers"}
        assert all(limit.limit > 0 for limit in again.others(section).values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_examples": 2**53}, "expected 11 examples at most, as the client registered for the task"),
        ({"num_steps": 1}, "expected 2 steps, as ordered for 11 examples, got 1"),
        ({"num_steps": 2**31}, "expected 2 steps, as ordered for 11 examples, got 2147483648"),
    ],
)
async def test_a_header_is_held_to_what_was_registered_and_ordered(tmp_path, change, words):
    """More examples than the client has, and other steps than it was told to make, are refused by the header alone."""
    device = Device("a", works=False)
    async with World(tmp_path) as world:
        await device.come(world)
        await world.create(round={"clients_per_round": 1}, stop={"rounds": 1})
        header, _ = await device.update(world, await device.assigned())
        for field, value in change.items():
            setattr(header, field, value)
        receipt = await device.contribute(world, await device.assigned())
        assert not receipt.admitted
        assert words in receipt.detail


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_diverged_run_goes_on_from_its_last_model(tmp_path, restarts):
    """SCAFFOLD's states begin anew; the rate holds from the round on in which the run had failed."""
    devices = [Device(name) for name in "ab"]
    world = await World(tmp_path).__aenter__()
    for device in devices:
        await device.come(world)
    run = await world.create(
        algorithm={"name": "scaffold"}, population=2, local={"steps": 2, "learning_rate": 0.1}, stop={"rounds": 3}
    )
    await until(lambda: len(run.log.commits) == 1, "a round is committed")
    run.fail("training led nowhere")
    await world.ended()
    done = len(run.log.commits)
    if restarts:
        await world.__aexit__()
        world = await World(tmp_path).__aenter__()
        for device in devices:
            await device.come(world)
        run = world.coordinator.run("r")
    with pytest.raises(WrongState, match="extending needs it to be"):
        await world.coordinator.extend(run, 1, 0.0, "admin")
    await world.coordinator.resume(run, "admin", 0.025)
    await world.completed()
    assert (len(run.log.commits), run.record.state_epoch) == (3, 1)
    assert [run.config.local.learning_rate_in(each) for each in (done - 1, done)] == [0.1, 0.025]
    assert from_stored(world.store.runs()[0].spec).local == run.config.local
    assert run.model._engine is None or run.model.engine.config.local == run.config.local
    await world.__aexit__()


async def test_of_two_operators_one_resumes(tmp_path):
    """The other is told that the run is no failed one any more, and its rate is not the run's."""
    async with World(tmp_path) as world:
        run = await world.create()
        run.fail("training led nowhere")
        await world.ended()
        calls = [world.coordinator.resume(run, "admin", rate) for rate in (0.25, 0.5)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert first is None
        assert isinstance(second, WrongState)
        assert run.config.local.learning_rate_in(0) == run.model.engine.config.local.learning_rate_in(0) == 0.25


async def test_a_paused_run_gets_no_other_rate(tmp_path):
    """Only what has failed goes on with another; a run that was paused goes on as it was."""
    async with World(tmp_path) as world:
        run = await world.create()
        await world.coordinator.pause(run, "admin")
        with pytest.raises(InvalidInput, match="learning_rate: expected none for a run that is paused"):
            await world.coordinator.resume(run, "admin", 0.1)
        await world.coordinator.resume(run, "admin")
        assert run.status != "paused"


async def test_a_run_whose_models_are_gone_is_refused_in_words(tmp_path):
    """It stays failed, and can be asked again once its files are back."""
    async with World(tmp_path) as world:
        await Device("a").come(world)
        run = await world.create(round={"clients_per_round": 1}, stop={"rounds": 9})
        await until(lambda: run.log.commits, "a round is committed")
        run.fail("training led nowhere")
        await world.ended()
        world.parts.checkpoints.remove_run("r")
        with pytest.raises(InvalidInput, match="a run whose committed models can be read"):
            await world.coordinator.resume(run, "admin")
        assert (run.status, run.model.loaded) == ("failed", False)


async def test_a_whole_round_that_is_too_long_fails_the_run(tmp_path):
    """Where nobody's update is as short as before, it is no culprit: the reason names the rate and the limit."""
    async with World(tmp_path) as world:
        for name in "ab":
            await Liar(name, lie=huge(30.0), lies_in=range(3, 4)).come(world)
        run = await world.create(stop={"rounds": 5})
        await world.ended()
        assert run.status == "failed"
        assert "the updates of all 2 clients of round 3 were longer than the run allows" in run.state.ending[1]
        assert "fl run resume r --learning-rate 0.05" in run.state.ending[1]
