"""Updates that would spoil a round are dropped or refused, in every exchange and across restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.base import Tensors
from fl_server.admission.norms import NormHistory
from fl_server.errors import InvalidInput, WrongState
from fl_server.rpc.views import run_status
from fl_server.run_settings.spec import from_stored
from protos.codec import Layout, digest_message, digest_of, pack, unpack
from protos.fl.v1.training_pb2 import (
    PAYLOAD_KIND_CLIENT_MOMENTUM,
    PAYLOAD_KIND_DELTA,
    PAYLOAD_KIND_FULL_GRADIENT,
    PAYLOAD_KIND_VARIATE_CHANGE,
    Assignment,
    UpdateHeader,
)
from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until
from tests.marks import slow_except

LARGEST = float(torch.finfo(torch.float32).max)
PLAIN = {"model": "plain"}
THREE = {"clients_per_round": 3, "min_clients": 3}


Change = Callable[[int, Tensors], None]
"""Changes the values of a payload of this kind."""


@dataclass
class FaultyDevice(Device):
    """In some rounds it sends an update that `change` has spoiled."""

    change: Change = lambda kind, values: None
    faulty_rounds: range = range(100)
    exchange: int = 0

    async def update(self, world: World, assignment: Assignment) -> tuple[UpdateHeader, bytes]:
        """The update, changed in the faulty rounds, with a header that fits."""
        header, data = await super().update(world, assignment)
        if assignment.key.round not in self.faulty_rounds or assignment.key.exchange != self.exchange:
            return header, data
        parts, at = [], 0
        for payload in header.payloads:
            layout = Layout.from_manifest(payload.manifest, 1 << 30)
            values = {name: each.clone() for name, each in unpack(data[at : at + layout.size_bytes], layout).items()}
            self.change(payload.kind, values)
            parts.append(bytes(pack(values, layout)))
            at += layout.size_bytes
        changed = UpdateHeader()
        changed.CopyFrom(header)
        changed.digest.CopyFrom(digest_message(digest_of(b"".join(parts))))
        return changed, b"".join(parts)


def huge(value: float, wanted: int = PAYLOAD_KIND_DELTA) -> Change:
    """Set every trained value of one payload to this value."""

    def change(kind: int, values: Tensors) -> None:
        for name, each in values.items():
            if kind == wanted and "running" not in name and each.is_floating_point():
                each.fill_(value)

    return change


async def run_to_completion(
    folder: Path, devices: Sequence[Device], dies_at: str | None = None, **sections: Any
) -> tuple[list[str], list[list[str]], list[str], list[str]]:
    """Digests, accepted lists, history and writes of a run. The coordinator may die once."""

    async def connect_and_run(world: World) -> list[str]:
        for device in devices:
            await device.connect(world)
        if not world.coordinator.runs():
            await world.create(**sections)
        return await world.completed()

    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(connect_and_run(world))
            await until(lambda: world.journal.dead, "the coordinator dies")
    async with World(folder) as world:
        digests = await connect_and_run(world)
        lists = [[client for client, _ in world.store.accepted("r", each, 0)] for each in range(len(digests))]
        return digests, lists, [entry.event for entry in world.store.history("r")], world.journal.writes


@pytest.mark.parametrize(
    ("limits", "value"), [({}, 1e6), ({"max_relative_norm": 0.0, "max_relative_payload": 0.0}, LARGEST)]
)
@pytest.mark.parametrize("dies_at", slow_except([None, "fix_accepted", "refuse_accepted"], "refuse_accepted"))
async def test_an_update_that_spoils_the_sum_is_dropped_and_the_round_repeated(
    tmp_path: Path, limits: dict[str, float], value: float, dies_at: str | None
) -> None:
    """It is found by its norm, or without limits by the overflow. A crash in between changes no bit."""
    round_ = {**THREE, "quorum": 2, **limits}
    sections: dict[str, Any] = {
        "algorithm": {"name": "fedavg", "parameters": {"eta_g": 10.0}},
        "round": round_,
        "stop": {"rounds": 2},
    }
    devices = [FaultyDevice("a", change=huge(value)), Device("b"), Device("c")]
    digests, lists, history, _ = await run_to_completion(tmp_path, devices, dies_at, **sections)
    assert (len(digests), lists) == (2, [["b", "c"], ["b", "c"]])
    assert history.count("culprit_dropped") == 2
    assert {outcome.counted for outcome in devices[0].outcomes.values()} == {False}


async def test_a_round_without_a_dropped_update_says_whose_is_missing(tmp_path: Path) -> None:
    """The account of the round has a refused update, with the reason of the refusal."""
    async with World(tmp_path) as world:
        for device in (FaultyDevice("a", change=huge(1e6)), Device("b"), Device("c")):
            await device.connect(world)
        run = await world.create(round={**THREE, "quorum": 2}, stop={"rounds": 1})
        await world.completed()
        why = run_status(run).latest.account.why_short
        assert why.startswith("round 0 has 2 of 3 updates: 1 refused; 1 of them: update refused: ")


async def test_the_only_client_of_a_round_is_replaced(tmp_path: Path) -> None:
    """There is no other update to compare with, but no training gives such a norm."""
    devices = [FaultyDevice("a", change=huge(LARGEST)), Device("b"), Device("c")]
    sections: dict[str, Any] = {"algorithm": {"name": "fedavg", "parameters": {"eta_g": 10.0}}, "stop": {"rounds": 4}}
    one = {"clients_per_round": 1, "min_clients": 3, "max_relative_norm": 0.0}
    digests, lists, history, _ = await run_to_completion(tmp_path, devices, round=one, **sections)
    assert len(digests) == 4
    assert "a" not in {client for clients in lists for client in clients}
    assert "culprit_dropped" in history


async def test_from_the_third_round_on_a_longer_update_is_refused(tmp_path: Path) -> None:
    """It has about a thousand times the norm of the others. The refusal names the limit, and the run goes on."""
    devices = [FaultyDevice("a", change=huge(30.0), faulty_rounds=range(3, 4)), Device("b"), Device("c")]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.create(round={**THREE, "quorum": 2}, stop={"rounds": 5})
        await world.completed()
        refused = [receipt for receipt in devices[0].receipts if not receipt.admitted]
        assert [receipt.key.round for receipt in refused] == [3]
        assert "100 times the largest median of a round" in refused[0].detail
        assert [commit.accepted for commit in world.store.commits("r")] == [3, 3, 3, 2, 3]


OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "mime": ({}, PAYLOAD_KIND_FULL_GRADIENT),
    "mimelite": ({}, PAYLOAD_KIND_FULL_GRADIENT),
    "scaffold": ({"option": "I"}, PAYLOAD_KIND_VARIATE_CHANGE),
    "mfl": ({}, PAYLOAD_KIND_CLIENT_MOMENTUM),
}
"""Parameters of each method whose clients send another payload than a delta, and the kind of that payload."""


async def run_with_one_long_payload(
    folder: Path, method: str, round_: int, **limits: float
) -> tuple[list[str], list[list[str]], list[str], list[str]]:
    """A run of three clients, of which one sends values of 1e6 in one round. Its delta is normal."""
    parameters, kind = OTHERS[method]
    faulty = FaultyDevice("a", change=huge(1e6, kind), faulty_rounds=range(round_, round_ + 1))
    return await run_to_completion(
        folder,
        [faulty, Device("b"), Device("c")],
        algorithm={"name": method, "parameters": parameters},
        population=3 if method == "scaffold" else 0,
        round={**THREE, "quorum": 2, **limits},
        stop={"rounds": round_ + 1},
    )


@pytest.mark.parametrize("round_", [0, 3])
@pytest.mark.parametrize("method", slow_except(OTHERS, "scaffold"))
async def test_every_payload_is_compared_with_payloads_of_its_kind(tmp_path: Path, method: str, round_: int) -> None:
    """In the first rounds with those of the exchange, later with committed ones."""
    digests, lists, history, _ = await run_with_one_long_payload(tmp_path, method, round_)
    assert lists == [["a", "b", "c"]] * round_ + [["b", "c"]]
    assert ("culprit_dropped" in history) is (round_ < 3)
    assert len(digests) == round_ + 1


@pytest.mark.parametrize("method", slow_except(OTHERS, "scaffold"))
async def test_without_the_limit_a_long_payload_counts(tmp_path: Path, method: str) -> None:
    """max_relative_payload = 0 turns the comparison off."""
    _, lists, _, _ = await run_with_one_long_payload(tmp_path, method, 0, max_relative_payload=0.0)
    assert lists == [["a", "b", "c"]]


async def test_norms_of_every_vector_are_recorded_and_restored(tmp_path: Path) -> None:
    """Of payloads and buffers of all exchanges. A restart restores the same limits."""
    async with World(tmp_path) as world:
        for name in "abc":
            await Device(name).connect(world)
        run = await world.create(algorithm={"name": "mime"}, round=THREE, stop={"rounds": 3})
        await world.completed()
        assert set(world.store.updates("r", 0, 0)[0].norms) == {"full_gradient"}
        assert set(world.store.updates("r", 0, 1)[0].norms) == {"delta", "buffers"}
        again = NormHistory()
        again.put_back(world.store.commits("r")[-1].norms)
        section = run.config.round
        assert again.to_text() == run.context.norms.to_text()
        assert set(again.others(section, 0.0)) == {"full_gradient", "buffers"}
        assert all(limit.limit > 0 for limit in again.others(section, 0.0).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_examples": 2**53}, "expected 11 examples at most, as the client registered for the task"),
        ({"num_steps": 1}, "expected 2 steps, as ordered for 11 examples, got 1"),
        ({"num_steps": 2**31}, "expected 2 steps, as ordered for 11 examples, got 2147483648"),
    ],
)
async def test_a_header_must_match_the_registration_and_the_assignment(
    tmp_path: Path, change: dict[str, int], message: str
) -> None:
    """More examples than registered, and another number of steps than assigned, are refused by the header alone."""
    device = Device("a", works=False)
    async with World(tmp_path) as world:
        await device.connect(world)
        await world.create(round={"clients_per_round": 1}, stop={"rounds": 1})
        header, _ = await device.update(world, await device.assigned())
        for field, value in change.items():
            setattr(header, field, value)
        receipt = await device.contribute(world, await device.assigned())
        assert receipt is not None
        assert not receipt.admitted
        assert message in receipt.detail


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_diverged_run_goes_on_from_its_last_model(tmp_path: Path, restarts: bool) -> None:
    """SCAFFOLD's states restart from zero. The new rate applies from the round in which the run failed."""
    devices = [Device(name) for name in "ab"]
    world = await World(tmp_path).__aenter__()
    for device in devices:
        await device.connect(world)
    run = await world.create(
        algorithm={"name": "scaffold"}, population=2, local={"steps": 2, "learning_rate": 0.1}, stop={"rounds": 3}
    )
    await until(lambda: run.rounds.committed == 1, "a round is committed")
    run.fail("training led nowhere")
    await world.ended()
    done = run.rounds.committed
    if restarts:
        await world.__aexit__()
        world = await World(tmp_path).__aenter__()
        for device in devices:
            await device.connect(world)
        run = world.coordinator.run("r")
    with pytest.raises(WrongState, match="extending needs it to be"):
        await world.coordinator.actions.extend(run, 1, 0.0, "admin")
    await world.coordinator.actions.resume(run, "admin", 0.025)
    await world.completed()
    assert (run.rounds.committed, run.record.state_epoch) == (3, 1)
    assert [run.config.local.learning_rate_in(each) for each in (done - 1, done)] == [0.1, 0.025]
    assert from_stored(world.store.runs()[0].spec).local == run.config.local
    assert run.model._engine is None or run.model.engine.config.local == run.config.local
    await world.__aexit__()


async def test_one_of_two_operators_resumes(tmp_path: Path) -> None:
    """The other gets WrongState, and its rate is not applied."""
    async with World(tmp_path) as world:
        run = await world.create()
        run.fail("training led nowhere")
        await world.ended()
        calls = [world.coordinator.actions.resume(run, "admin", rate) for rate in (0.25, 0.5)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert first is None
        assert isinstance(second, WrongState)
        assert run.config.local.learning_rate_in(0) == run.model.engine.config.local.learning_rate_in(0) == 0.25


async def test_a_paused_run_cannot_get_another_rate(tmp_path: Path) -> None:
    """Only a failed run may continue with another rate."""
    async with World(tmp_path) as world:
        run = await world.create()
        await world.coordinator.actions.pause(run, "admin")
        with pytest.raises(InvalidInput, match="learning_rate: expected none for a run that is paused"):
            await world.coordinator.actions.resume(run, "admin", 0.1)
        await world.coordinator.actions.resume(run, "admin")
        assert run.status != "paused"


async def test_a_run_with_missing_models_cannot_be_resumed(tmp_path: Path) -> None:
    """It stays failed, and can be resumed once its files are back."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        run = await world.create(round={"clients_per_round": 1}, stop={"rounds": 9})
        await until(lambda: run.rounds.recent, "a round is committed")
        run.fail("training led nowhere")
        await world.ended()
        world.services.checkpoints.remove_run("r")
        with pytest.raises(InvalidInput, match="a run whose committed models can be read"):
            await world.coordinator.actions.resume(run, "admin")
        assert (run.status, run.model.loaded) == ("failed", False)


async def test_a_round_in_which_all_updates_are_too_long_fails_the_run(tmp_path: Path) -> None:
    """If all updates are longer than before, no client is at fault: the reason names rate and limit."""
    async with World(tmp_path) as world:
        for name in "ab":
            await FaultyDevice(name, change=huge(30.0), faulty_rounds=range(3, 4)).connect(world)
        run = await world.create(stop={"rounds": 5})
        await world.ended()
        assert run.status == "failed"
        assert run.state.ending is not None
        assert "all updates of round 3, from 2 clients, had larger norms than the run allows" in run.state.ending[1]
        assert "fl run resume r --learning-rate 0.05" in run.record.reason
