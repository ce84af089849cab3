"""A run with privacy of clients tells nobody who, and how many, take part in a round: every surface looks the same.

Two coordinators have the same clients and the same run. Only their secrets differ, so they draw other cohorts. Whatever
operators can read is compared: all that the Admin service returns, the metrics, the log and the history.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from fl_server.aggregation.privacy import seed_of_draws
from fl_server.errors import InvalidInput
from fl_server.rounds.sampling import Draw, draw_bernoulli
from fl_server.rpc.admin import AdminService
from fl_server.rpc.methods import ADMIN, METHODS
from fl_server.store import state_directory
from fl_server.store.records import QuarantineRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import coordinator_pb2
from tests.fl_server.devices import NO_CONTEXT
from tests.fl_server.harness import World, until
from tests.fl_server.killed_runs import NAMES
from tests.fl_server.run.test_private_runs import PRIVATE, devices

ROUNDS = 3
SECTIONS: dict[str, Any] = PRIVATE | {"stop": {"rounds": ROUNDS}, "round": {"sampling": "bernoulli", "rate": 0.5}}
REQUESTS: dict[str, list[Any]] = {
    "GetRun": [pb.GetRunRequest(run_id="r", with_rounds=True)],
    "ListRuns": [pb.ListRunsRequest()],
    "ListRounds": [pb.ListRoundsRequest(run_id="r")],
    "ListCohort": [pb.ListCohortRequest(run_id="r")],
    "ListEvaluations": [pb.ListEvaluationsRequest(run_id="r"), pb.ListEvaluationsRequest(run_id="r", round=0)],
    "ListClients": [
        pb.ListClientsRequest(order=order, descending=True)  # type: ignore[arg-type]
        for order in pb.ClientOrder.values()
        if order != pb.CLIENT_ORDER_LAST_SEEN
    ],
    "GetClient": [pb.GetClientRequest(client_id=name, history=1000) for name in NAMES],
    "ListHistory": [pb.ListHistoryRequest(), pb.ListHistoryRequest(subject="r")],
    "GetOverview": [pb.GetOverviewRequest(points=10)],
    "ListAudit": [pb.ListAuditRequest()],
}
"""The calls that read what is about runs and clients."""
OTHERS = {
    "CreateRun", "PauseRun", "ResumeRun", "ExtendRun", "StopRun", "DeleteRun", "BanClient", "UnbanClient",
    "ReleaseClient", "ForgetClient", "DrainClient", "ExportModel", "UploadModel", "WhoAmI", "CreateWebLink",
    "CreateEnrollments", "ListEnrollments", "RevokeEnrollment", "ListCertificates", "RevokeCertificates",
    "ListAuthorities",
    "WatchRun", "WatchHistory", "CreateRelease", "AdvanceRelease", "RollBackRelease", "GetRelease", "ListReleases",
    "AddPackage",
}  # fmt: skip
"""The calls that change something, that are not about runs and clients, or whose content is in the others' or below."""
OF_MODELS = {
    "modelDigest", "metrics", "newestMetrics", "bestMetrics", "norms", "cosine", "best", "clip", "points", "value",
    "averagedDigest", "training_loss",
}  # fmt: skip
"""What follows from the models, which have noise: a release that is charged."""
OF_TIME = {
    "time", "committed", "created", "ended", "seconds", "lastSeen", "latestCommit", "now", "registered",
    "deadlineLeftS", "historyNumber", "number", "firstNumber", "hash", "headHash", "instanceId",
    "tightEpsilon", "tightEpsilonOfSeenCohorts",
}  # fmt: skip
"""Times and row numbers, and with them how long a round took: the page on privacy says so. The second accountant's
epsilon, of the number of draws alone, is there when its thread has answered."""
TOTALS = (
    "fl_transfer", "fl_rpc_seconds", "fl_event_loop", "fl_commit_write", "fl_state_dir", "fl_uploads_in_flight",
    "fl_evaluation", "fl_norm", "fl_update_direction", "process_", "python_", "fl_last_commit", "fl_run_state_since",
    "fl_round_seconds", "fl_phase_seconds", "fl_requests", "fl_connections",
    'fl_privacy_epsilon{accountant="loss_distributions"',
)  # fmt: skip
"""Totals over all runs, times, and what follows from the models."""


def without(values: Any, left_out: set[str]) -> Any:
    """The same without these keys, on any level."""
    if isinstance(values, Mapping):
        return {name: without(value, left_out) for name, value in values.items() if name not in left_out}
    if isinstance(values, list):
        return [without(value, left_out) for value in values]
    return values


def differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """Each place where two values differ, with both."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one.keys() | other.keys():
            yield from differences(one.get(name), other.get(name), f"{where}/{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}/{number}")
    elif one != other:
        yield f"{where}: {one}, {other}"


async def seen(world: World) -> dict[str, Any]:
    """All that operators can read now."""
    admin, found = AdminService(world.services, world.coordinator), dict[str, Any]()
    for name, requests in REQUESTS.items():
        answers = []
        for request in requests:
            try:
                answers.append(MessageToDict(await getattr(admin, name)(request, NO_CONTEXT)))
            except InvalidInput as refused:
                answers.append({"refused": str(refused)})
        found[name] = without(answers, OF_MODELS | OF_TIME)
    lines = generate_latest(world.services.metrics.registry).decode().splitlines()
    found["metrics"] = [line for line in lines if not line.startswith(("#", *TOTALS)) and "_created" not in line]
    return found


@dataclass
class Draws:
    """What a secret draws in the first rounds."""

    secret: bytes
    cohorts: list[tuple[str, ...]]


def secrets_with_other_draws() -> tuple[Draws, Draws]:
    """Two secrets: both draw somebody in the first round, another number of clients in each round, and others."""
    made = [Draws(bytes([number]) * 32, cohorts(bytes([number]) * 32)) for number in range(200)]
    for first in made:
        for second in made:
            pairs = [*zip(first.cohorts, second.cohorts, strict=True)]
            if all(a and b and len(a) != len(b) for a, b in pairs):
                return first, second
    raise AssertionError("no secrets differ so")


def cohorts(secret: bytes) -> list[tuple[str, ...]]:
    """The draws of the first rounds."""
    return [draw_bernoulli(NAMES, 0.5, Draw(seed_of_draws(secret), round_, 0), 0) for round_ in range(ROUNDS)]


async def story(folder: Path, draws: Draws, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is seen in the first round, and at the end, with the events that watchers got and the log."""
    monkeypatch.setattr(state_directory, "secrets", SimpleNamespace(token_bytes=lambda size: draws.secret))
    with capture_logs() as logs:
        async with World(folder) as world:
            here = devices()
            for device in here:
                device.works = False
                await device.connect(world)
                await world.services.fleet.records.write_note(device.name, "an old failure")
            before = [QuarantineRecord(device.name, 1, 0.0, "one refusal", failures=1) for device in here]
            await world.services.ledger.do(world.store.put_quarantine_records, [(record, None) for record in before])
            world.services.fleet.quarantine.restore(before)
            run = await world.create(**SECTIONS)
            watched = world.spawn(events(world))
            await until(lambda: run.state.drawn, "the first cohort is drawn")
            drawn = [device for device in here if device.name in run.state.drawn]
            assert [device.name for device in drawn] == [*draws.cohorts[0]]
            for device in drawn:
                await device.assigned()
            begun = await seen(world)
            for device in here:
                device.works = True
            for device in drawn:
                world.spawn(device.contribute(world, await device.assigned()))
            await world.completed()
            assert {len(world.store.accepted("r", round_, 0)) for round_ in range(ROUNDS)} >= {len(draws.cohorts[0])}
            found = await seen(world)
            told = await watched
    texts = [without(dict(line), {"seconds", "model", "metrics"}) for line in logs if line["event"] not in SESSIONS]
    # An evaluation ends before or after the next draw: the order of these lines is that of threads.
    return [begun, found, sorted(told, key=str), sorted(texts, key=str)]


SESSIONS = {"client_registered", "client_attached", "run_being_created"}


async def events(world: World) -> list[Any]:
    """The events of a watched run, to its end."""
    admin = AdminService(world.services, world.coordinator)
    stream: AsyncIterator[pb.WatchRunResponse] = admin.WatchRun(pb.WatchRunRequest(run_id="r"), NO_CONTEXT)
    return [without(MessageToDict(event), OF_MODELS | OF_TIME | {"run"}) async for event in stream]


def test_every_reading_call_is_compared() -> None:
    """A new call of the Admin service has to be added to one of the lists."""
    assert {name.removeprefix(ADMIN) for name in METHODS if name.startswith(ADMIN)} == OTHERS | REQUESTS.keys()


async def test_no_surface_tells_two_cohorts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cohorts have other clients and other sizes in each round, and nothing that can be read differs."""
    first, second = secrets_with_other_draws()
    one = await story(tmp_path / "one", first, monkeypatch)
    other = await story(tmp_path / "other", second, monkeypatch)
    for number, name in enumerate(("in the first round", "at the end", "watched", "logged")):
        assert [*differences(one[number], other[number], name)] == []
    assert "draws are secret" in str(one[0]["ListCohort"])
    assert one[0]["GetRun"][0]["run"]["cohortsHidden"]


async def test_a_device_whose_work_fails_is_named_without_its_run(tmp_path: Path) -> None:
    """Operators can repair it: client, reason and day are there, in its record, its note and the log."""
    with capture_logs() as logs:
        async with World(tmp_path) as world:
            [device, refused, *_] = here = devices()
            for each in here:
                each.works = False
                await each.connect(world)
            run = await world.create(**(SECTIONS | {"round": {"sampling": "bernoulli", "rate": 1.0}}))
            await device.report_failure(world, await device.assigned(), coordinator_pb2.FAILURE_REASON_TASK_ERROR)
            await until(lambda: not run.state.works(device.name), "the failure is known")
            admin = AdminService(world.services, world.coordinator)
            shown = await admin.GetClient(pb.GetClientRequest(client_id=device.name), NO_CONTEXT)
            header, data = await refused.update(world, await refused.assigned())
            header.num_examples = 0
            assert not (await refused._send(world, header, data)).admitted
            standing = await admin.GetClient(pb.GetClientRequest(client_id=refused.name, history=100), NO_CONTEXT)
            await admin.ReleaseClient(pb.ReleaseClientRequest(client_id=refused.name), NO_CONTEXT)
            released = await admin.GetClient(pb.GetClientRequest(client_id=refused.name), NO_CONTEXT)
            history = await admin.ListHistory(pb.ListHistoryRequest(subject="r"), NO_CONTEXT)
            status = (await admin.GetRun(pb.GetRunRequest(run_id="r"), NO_CONTEXT)).run
    assert "the last one in a run with differential privacy (header)" in standing.standing.reason
    assert not [entry for entry in standing.history if entry.detail.startswith("run ")]
    assert standing.client.note.startswith("update refused (header)")
    assert (released.client.note, released.HasField("standing")) == ("", False)
    failure = shown.client.work.last_failure
    assert (failure.run_id, failure.round, failure.time.seconds % 86400) == ("-", 0, 0)
    assert "the test asked for it" in failure.message
    assert "the test asked for it" in shown.client.note
    assert (shown.client.run_id, shown.work) == ("", "")
    [line] = [line for line in logs if line["event"] == "client_failed"]
    assert line["client"] == device.name
    assert not {"run", "round"} & line.keys()
    assert not status.HasField("latest_failure")
    assert {entry.event for entry in history.entries} == {"run_created", "attempt_opened"}
