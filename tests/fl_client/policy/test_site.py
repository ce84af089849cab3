"""A daemon with a policy file: what it refuses, before anything is fetched, and what it registers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from fl_client.errors import ConfigError
from fl_client.policy import budget as usage_file
from fl_client.policy.config import trusted_certificates
from fl_common.certificates.pem import fingerprint
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator
from tests.fl_client.fleet import Fleet
from tests.processes.certificates import Pki
from tests.processes.policies import without_floors

QUICK = {"check_s": 0.02}
"""Gates and policy are looked at often."""


class PolicyFile:
    """A policy file that a test rewrites as an owner should: written beside and renamed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "policy.toml"

    def write(self, text: str) -> Path:
        """Replace the content, with no floors: the device has four examples."""
        beside = self.path.with_suffix(".new")
        beside.write_text(without_floors(text))
        return beside.replace(self.path)


@pytest.fixture
def file(tmp_path: Path) -> PolicyFile:
    """A site's file, still without content."""
    return PolicyFile(tmp_path)


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """The daemon's log."""
    with capture_logs() as lines:
        yield lines


def failures(coordinator: FakeCoordinator) -> list[pb.WorkFailure]:
    """All reported failures."""
    return [failure for status in coordinator.calls["ReportStatus"] for failure in status.failures]


def evaluation(coordinator: FakeCoordinator, round_number: int) -> training_pb2.EvaluationAssignment:
    """The evaluation of a model."""
    train = coordinator.assignment(round_number)
    return training_pb2.EvaluationAssignment(
        key=train.key, task=train.task, fingerprint=train.fingerprint, resources=train.resources
    )


def _unknown_field(work: training_pb2.Assignment) -> None:
    work.training.MergeFromString(b"\xf8\x07\x01")


def _steps(work: training_pb2.Assignment) -> None:
    work.training.local_steps = 4


def _huge_batch(work: training_pb2.Assignment) -> None:
    work.training.local_steps, work.training.batch_size = 4, 2**32 - 1


def _other_code(work: training_pb2.Assignment) -> None:
    work.fingerprint.source = "sha256:" + "00" * 32


def _nothing(work: training_pb2.Assignment) -> None:
    del work


REFUSED: list[tuple[str, Callable[[training_pb2.Assignment], None], str]] = [
    ('[tasks]\nallow = ["digits"]', _nothing, "policy: tasks: 'tiny' is not in tasks.allow"),
    (
        f'[tasks]\nallow = ["tiny"]\n[tasks.fingerprints]\ntiny = ["{"ab" * 32}"]', _other_code,
        f"policy: tasks: the code of 'tiny', 'sha256:{'00' * 32}', is not in tasks.fingerprints",
    ),
    ("[algorithms]\nallow = []", _nothing, "policy: algorithms: 'fedavg' is not in algorithms.allow"),
    ("[work]\nmax_epochs = 3", _steps, "policy: work: work.max_epochs is 3, and the assignment has 4"),
    ("[work]\nmax_epochs = 3", _huge_batch, "policy: work: work.max_epochs is 3, and the assignment has 4"),
    ("[work]\nmax_model_bytes = 15", _nothing, "policy: work: work.max_model_bytes is 15, and the assignment has 20"),
    ("[day]\nmax_steps = 3", _steps, "policy: day: day.max_steps is 3, and the assignment needs 4"),
    ("[day]\nmax_bytes_down = 3", _nothing, "policy: day: day.max_bytes_down is 3, and the assignment needs 20"),
    ("[day]\nmax_bytes_up = 3", _nothing, "policy: day: day.max_bytes_up is 3, and the assignment needs 16"),
    (
        "[privacy]\nrequire = true", _nothing,
        "policy: privacy: privacy.require is true, and the run states no differential privacy",
    ),
    (
        "", _unknown_field,
        "policy: unknown_demands: the assignment has fields that this version does not know: Assignment.training.127",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "change", "message"), REFUSED, ids=[message[8:40] for _, _, message in REFUSED])
async def test_refused_work_is_reported_and_nothing_is_fetched(
    fleet: Fleet,
    coordinator: FakeCoordinator,
    file: PolicyFile,
    text: str,
    change: Callable[[training_pb2.Assignment], None],
    message: str,
) -> None:
    """The coordinator learns the rule, the owner's metric counts it, and no step is made."""
    async with fleet.daemon(policy=file.write(text)) as daemon:
        await coordinator.until_called("Attend")
        work = coordinator.assignment()
        change(work)
        coordinator.push(assignment=work)
        await coordinator.until(lambda: failures(coordinator))
        rule = message.split(": ")[1]
        assert (daemon.count("policy_refusals_total", rule=rule), daemon.count("training_steps_total")) == (1, 0)
    (failure,) = failures(coordinator)
    assert (failure.reason, failure.message) == (pb.FAILURE_REASON_POLICY, message)
    assert coordinator.calls["FetchModel"] == []


def _reported(coordinator: FakeCoordinator, count: int) -> bool:
    return len(failures(coordinator)) == count


EXTREMES: list[dict[str, Any]] = [
    {"local_steps": 2**32 - 1},
    {"task": "x" * 10_000},
    {"algorithm": "y" * 10_000},
    {"fingerprint": training_pb2.TaskFingerprint(source="\x00\n" * 5000)},
    {"resources": [tensor_pb2.Resource(kind=tensor_pb2.RESOURCE_KIND_MODEL, size_bytes=2**64 - 1)]},
    {"payloads": [training_pb2.PAYLOAD_KIND_DELTA] * 16},
    {"training": training_pb2.LocalTraining()},
    {"training": training_pb2.LocalTraining(learning_rate=math.nan, local_epochs=1, batch_size=1)},
    {"training": training_pb2.LocalTraining(learning_rate=-1.0, local_epochs=2**32 - 1, batch_size=2**32 - 1)},
    {"training": training_pb2.LocalTraining(learning_rate=0.1, local_steps=2**32 - 1, batch_size=0)},
]


async def test_extreme_values_are_refused_and_counted_nowhere(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile
) -> None:
    """NaN, negative and huge numbers, and long names, under a policy with all limits. The next work is done."""
    text = """
        [tasks]
        allow = ["tiny"]
        [algorithms]
        allow = ["fedavg"]
        [work]
        max_epochs = 2
        max_model_bytes = 1000
        [day]
        max_steps = 10
        max_bytes_up = 100
    """
    async with fleet.daemon(policy=file.write(text)) as daemon:
        await coordinator.until_called("Attend")
        for number, changes in enumerate(EXTREMES):
            coordinator.push(assignment=coordinator.assignment(number, **changes))
            await coordinator.until(partial(_reported, coordinator, number + 1))
        assert daemon.count("policy_day_used", amount="assignments") == 0
        coordinator.push(assignment=coordinator.assignment(len(EXTREMES)))
        await coordinator.until(lambda: coordinator.updates)
    assert coordinator.calls["FetchModel"][0].digest.value in coordinator.bundles
    assert max(len(failure.message) for failure in failures(coordinator)) <= 1000


async def test_allowed_work_is_done(fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile) -> None:
    """A policy with a rule of every kind, and work within all of them."""
    text = """
        [coordinators]
        ids = ["fake"]
        [tasks]
        allow = ["tiny"]
        [algorithms]
        allow = ["fedavg"]
        [work]
        max_epochs = 1
        max_steps = 1
        max_model_bytes = 20
        [day]
        max_assignments = 2
        max_steps = 100
        max_examples = 100
        max_seconds = 100
        max_bytes_down = 100
        max_bytes_up = 100
        [hours]
        windows = ["00:00-24:00"]
    """
    async with fleet.daemon(policy=file.write(text)) as daemon:
        await coordinator.until_called("Attend")
        coordinator.push(assignment=coordinator.assignment())
        await coordinator.until(lambda: coordinator.updates)
        coordinator.push(evaluation=evaluation(coordinator, 0))
        await coordinator.until_called("ReportEvaluation")
        await daemon.until(lambda: daemon.count("policy_day_used", amount="assignments") == 2)
        assert daemon.count("policy_day_used", amount="examples") == 4
    assert failures(coordinator) == []
    kept = json.loads((fleet.folder / usage_file.FILE).read_text())
    assert (kept["assignments"], kept["steps"], kept["bytes_down"], kept["bytes_up"]) == (2, 1, 20, 16)
    assert kept["seconds"] > 0


async def test_results_of_evaluations_do_not_leave(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile
) -> None:
    """The device offers no held-out examples, no labels and no description, and refuses an evaluation that comes."""
    text = "[share]\nevaluations = false\nlabels = false\ndevice = false"
    async with fleet.daemon(policy=file.write(text), labels={"ward": "7"}):
        await coordinator.until_called("Attend")
        coordinator.push(evaluation=evaluation(coordinator, 0))
        await coordinator.until(lambda: failures(coordinator))
        coordinator.push(assignment=coordinator.assignment(1))
        await coordinator.until(lambda: coordinator.updates)
    (request,) = coordinator.calls["Register"]
    assert ([offer.eval_examples for offer in request.tasks], dict(request.labels)) == ([0], {})
    assert not request.HasField("device")
    assert failures(coordinator)[0].message.startswith("policy: share: share.evaluations is false")
    assert coordinator.calls["ReportEvaluation"] == []


async def test_another_coordinator_is_not_attended(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile, logs: list[EventDict]
) -> None:
    """The daemon drops the session of an unknown coordinator, logs its id, and tries again later."""
    async with fleet.daemon(policy=file.write('[coordinators]\nids = ["ours"]'), gates=QUICK) as daemon:
        await coordinator.until_called("Register", 2)
        assert coordinator.calls["Attend"] == []
        assert daemon.count("policy_refusals_total", rule="coordinators") >= 1
        coordinator.id = "ours"
        await coordinator.until_called("Attend")
    line = next(line for line in logs if line["event"] == "refused")
    assert line["reason"] == "policy: coordinators: the coordinator's id 'fake' is not in coordinators.ids"
    assert "policy file" in line["todo"]


async def test_pins_without_tls_send_nothing(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile, logs: list[EventDict]
) -> None:
    """Plain text proves no authority."""
    text = f'[coordinators]\nca_sha256 = ["{"ab" * 32}"]'
    async with fleet.daemon(policy=file.write(text)) as daemon:
        await daemon.until(lambda: daemon.count("policy_refusals_total", rule="coordinators") >= 2)
    assert coordinator.calls["Register"] == []
    assert any("needs TLS" in line["reason"] for line in logs if line["event"] == "refused")


async def test_a_used_up_day_is_reported_as_unavailable(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile
) -> None:
    """After the last assignment of the day the device reports that it may not train, and until when; no failure."""
    async with fleet.daemon(policy=file.write("[day]\nmax_assignments = 1"), gates=QUICK):
        await coordinator.until_called("Attend")
        coordinator.push(assignment=coordinator.assignment())
        await coordinator.until(lambda: coordinator.updates)
        await coordinator.until_called("ReportStatus")
    status = coordinator.calls["ReportStatus"][0]  # the last one says that the daemon stops
    assert (status.availability.may_train, status.availability.reason) == (False, pb.UNAVAILABLE_REASON_OWNER)
    assert status.availability.HasField("until")
    assert "day.max_assignments" in status.availability.detail
    assert not status.failures
    async with fleet.daemon(policy=file.path, gates=QUICK):
        await coordinator.until_called("Register", 2)
    assert not coordinator.calls["Register"][1].availability.may_train


async def test_work_that_does_not_fit_today_is_refused_with_the_end_of_the_day(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile
) -> None:
    """Both are in one report, so that no run draws the device in between."""
    async with fleet.daemon(policy=file.write("[day]\nmax_steps = 5")):
        await coordinator.until_called("Attend")
        coordinator.push(assignment=coordinator.assignment(0, local_steps=3))
        await coordinator.until(lambda: coordinator.updates)
        coordinator.push(assignment=coordinator.assignment(1, local_steps=3))
        await coordinator.until(lambda: failures(coordinator))
    status = next(report for report in coordinator.calls["ReportStatus"] if report.failures)
    assert status.failures[0].reason == pb.FAILURE_REASON_POLICY
    assert (status.availability.may_train, status.availability.reason) == (False, pb.UNAVAILABLE_REASON_OWNER)


async def test_a_changed_file_applies_to_the_next_assignment(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile
) -> None:
    """Without a restart, and the daemon registers again, so that the coordinator asks it anew."""
    async with fleet.daemon(policy=file.write(""), gates=QUICK):
        await coordinator.until_called("Attend")
        file.write("[algorithms]\nallow = []")
        coordinator.assign(coordinator.assignment())  # it may come while the daemon registers again
        await coordinator.until(lambda: failures(coordinator))
        await coordinator.until_called("Attend", 2)
    assert failures(coordinator)[0].reason == pb.FAILURE_REASON_POLICY
    assert len(coordinator.calls["Register"]) == 2


async def test_a_file_that_becomes_invalid_stops_all_work(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile, logs: list[EventDict]
) -> None:
    """No earlier, weaker rules: the device takes no work until the file is repaired, and then goes on by itself."""
    async with fleet.daemon(policy=file.write(""), gates=QUICK) as daemon:
        await coordinator.until_called("Attend")
        file.write("[algorithms")
        coordinator.push(assignment=coordinator.assignment())
        await coordinator.until(lambda: failures(coordinator))
        await daemon.until(lambda: daemon.count("gate_closed", gate="policy") == 1)
        file.write('[algorithms]\nallow = ["fedavg"]')
        await daemon.until(lambda: daemon.count("gate_closed", gate="policy") == 0)
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert failures(coordinator)[0].message == "the site's policy file cannot be used"
    line = next(line for line in logs if line["event"] == "policy_unusable")
    assert str(file.path) in line["reason"]


async def test_an_invalid_file_stops_the_start(fleet: Fleet, file: PolicyFile) -> None:
    """A daemon never runs without the rules that its settings name."""
    with pytest.raises(ConfigError, match="policy: "):
        async with fleet.daemon(policy=file.write("[algorithms]\nalow = []")):
            pass


async def test_hours_of_the_policy_close_the_device(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile
) -> None:
    """Outside them the device registers as one that may not train, and since when it may."""
    text = '[hours]\nwindows = ["22:00-06:00"]\ntimezone = "UTC"'
    noon = 1_793_620_800.0
    async with fleet.daemon(clock=lambda: noon, policy=file.write(text)):
        await coordinator.until_called("Register")
    availability = coordinator.calls["Register"][0].availability
    assert (availability.may_train, availability.reason) == (False, pb.UNAVAILABLE_REASON_OWNER)
    assert availability.until.seconds == noon + 10 * 3600


async def test_work_ends_with_the_seconds_of_the_day(
    fleet: Fleet, coordinator: FakeCoordinator, file: PolicyFile
) -> None:
    """A coordinator cannot use more of the day by one long assignment."""
    async with fleet.daemon(policy=file.write("[day]\nmax_seconds = 0.2")):
        await coordinator.until_called("Attend")
        coordinator.push(assignment=coordinator.assignment(0, local_steps=100_000))
        await coordinator.until(lambda: failures(coordinator))
    assert failures(coordinator)[0].message == "policy: day: day.max_seconds is 0.2, and the work took longer"
    assert coordinator.updates == {}


@pytest.mark.parametrize("pinned", ["ours", "both", "none"])
def test_only_pinned_authorities_are_trusted(tmp_path: Path, pinned: str) -> None:
    """Of a bundle with two authorities the connection gets the pinned ones; without any it is not made."""
    ours, other = Pki(tmp_path / "ours", "Ours"), Pki(tmp_path / "other", "Other")
    bundle = ours.ca.read_bytes() + other.ca.read_bytes()
    pins: dict[str, list[Any]] = {
        "ours": [ours.authority.certificate],
        "both": [ours.authority.certificate, other.authority.certificate],
        "none": [],
    }
    trusted = trusted_certificates(bundle, [fingerprint(pin) for pin in pins[pinned]])
    assert trusted.count(b"BEGIN CERTIFICATE") == len(pins[pinned])
