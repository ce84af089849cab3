"""The fewest updates of a model: what an operator who is no admin may ask for, and what it may export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_server.errors import InvalidInput, TooFewUpdates
from fl_server.identity import ANYBODY, Identity
from fl_server.rpc.admin import AdminService
from fl_server.run_settings.spec import to_spec
from protos.fl.v1 import admin_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, run_config
from tests.fl_server.rpc.test_owners import ALICE, CONTEXT, ROOT, calling_as

BOTH = Identity("admin", "root", source="token", roles=frozenset({"operator", "admin"}))


def request(**sections: Any) -> pb.CreateRunRequest:
    """A run with these sections."""
    return pb.CreateRunRequest(spec=to_spec(run_config("r", **sections)))


@pytest.mark.parametrize(
    ("round_", "message"),
    [
        ({"clients_per_round": 1}, r"clients_per_round to be at least min_accepted \(3;"),
        ({"clients_per_round": 1, "min_accepted": 1}, r"round.min_accepted.*at least 3 .*got 1"),
        ({"clients_per_round": 5, "quorum": 2}, r"quorum to be at least min_accepted \(3;"),
        ({"sampling": "bernoulli", "min_clients": 2}, r"min_clients to be at least min_accepted \(3;"),
        ({"clients_per_round": 9, "quorum": 9, "reducer": "krum", "krum_keep": 1}, "krum_keep"),
    ],
)
async def test_an_operator_cannot_have_the_step_of_one_example(
    tmp_path: Path, round_: dict[str, Any], message: str
) -> None:
    """One client, one step and one example a round; or any setting that leaves fewer than three updates in a model."""
    async with World(tmp_path) as world:
        admin = AdminService(world.services, world.coordinator)
        attack = request(round=round_, local={"steps": 1, "batch_size": 1})
        with calling_as(ALICE), pytest.raises(InvalidInput, match=message):
            await admin.CreateRun(attack, CONTEXT)
        assert world.coordinator.runs() == []


@pytest.mark.parametrize(("who", "least"), [(ALICE, 3), (ROOT, 0), (BOTH, 0), (ANYBODY, 0)])
async def test_the_floor_of_a_new_run(tmp_path: Path, who: Identity, least: int) -> None:
    """Three for an operator; none for an admin, and where nobody has an identity."""
    async with World(tmp_path) as world:
        admin = AdminService(world.services, world.coordinator)
        with calling_as(who):
            created = await admin.CreateRun(request(round={"clients_per_round": 9}), CONTEXT)
        assert created.run.spec.round.min_accepted == least


async def test_an_operator_gets_no_model_of_two_updates(tmp_path: Path) -> None:
    """Not the latest, the best or that of a number, of a run that an admin made for it. The admin gets it."""
    async with World(tmp_path) as world:
        for name in "ab":
            await Device(name).connect(world)
        admin = AdminService(world.services, world.coordinator)
        with calling_as(ROOT):
            await admin.CreateRun(request(owner="alice", stop={"rounds": 1}), CONTEXT)
            await world.completed()
        for wanted in ("latest", "best", "0"):
            export = pb.ExportModelRequest(run_id="r", round=wanted)
            with calling_as(ALICE), pytest.raises(TooFewUpdates, match="has 2 updates.*expected at least 3"):
                async for _ in admin.ExportModel(export, CONTEXT):
                    pass
            with calling_as(ROOT):
                messages = [each async for each in admin.ExportModel(export, CONTEXT)]
            assert messages[0].header.round.accepted == 2
