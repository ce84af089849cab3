"""Changed answers of a hostile coordinator for a real daemon, and what the daemon may have done after them.

What fails: a daemon that ended, a file outside its state directory, too many bytes inside it, growth of its memory, or
another update in a correct round afterwards.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
from google.protobuf.message import Message

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2
from tests.fuzz.examples import examples
from tests.fuzz.mutation import changed, random_for
from tests.hostile.bad_coordinator import Answer, BadCoordinator, Failure
from tests.hostile.federation import Memory
from tests.processes.federation import Daemon
from tests.processes.process import Workspace

BATCH = 50
"""Events between two correct rounds."""
MOST_STATE_BYTES = 16 << 20
MOST_GROWTH_MIB = 128.0
LIMITS = {"max_wait_s": 1.0, "max_runs": 3, "max_assignments": 4, "max_steps": 50, "max_seconds": 5.0}
_METHODS = ("Register", "SubmitUpdate", "QueryUpload", "ReportStatus", "ReportEvaluation")
_ANSWERS: dict[str, type[Message]] = {
    "Register": pb.RegisterResponse, "SubmitUpdate": pb.SubmitUpdateResponse, "QueryUpload": pb.QueryUploadResponse,
    "ReportStatus": pb.ReportStatusResponse, "ReportEvaluation": pb.ReportEvaluationResponse,
}  # fmt: skip
_PATHS = ("../../x", "/tmp/x", "..\\x", "a/b", "x\x00y", "~root", "$(id)", "%2e%2e%2fx", "CON", "x" * 300)  # noqa: S108 - names that a daemon must not use as paths


@dataclass(slots=True)
class DaemonResult:
    """What was sent, and what came of it."""

    sent: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    growth_mib: float = 0.0
    failures: list[str] = field(default_factory=list)


def play(folder: Path, seed: int, over: Callable[[int], bool]) -> DaemonResult:
    """Send until `over(sent)` is true. The folder has the daemon's files and nothing else."""
    result = DaemonResult()
    with Workspace(folder) as workspace, BadCoordinator() as coordinator:
        daemon = Daemon(workspace, coordinator, "edge-1", limits=LIMITS).start()
        coordinator.until_attended(0)
        digest, memory = coordinator.proper_round(), Memory(daemon.pid)
        files, base = _outside(folder, daemon), memory.now()
        while not result.failures and not over(result.sent.total()):
            _batch(coordinator, seed, result)
            coordinator.honest()
            try:
                if coordinator.proper_round() != digest:
                    result.failures.append("a correct round has another update")
            except AssertionError as error:
                result.failures.append(f"no correct round afterwards: {error}; {daemon.tail(3)}")
            result.rounds += 1
            result.failures += _harm(folder, daemon, files)
            result.growth_mib = memory.now() - base if daemon.exit_code is None else 0.0
    if result.growth_mib > MOST_GROWTH_MIB:
        result.failures.append(f"the daemon's memory grew by {result.growth_mib:.0f} MiB")
    return result


def _batch(coordinator: BadCoordinator, seed: int, result: DaemonResult) -> None:
    """Changed events on the stream, while other calls get changed answers or failures."""
    random = random_for(seed, "daemon", result.sent.total())
    for method in random.sample(_METHODS, 2):
        coordinator.answers[method] = _answer(method, random, result)
    for number in range(BATCH):
        event = _event(coordinator, random, number)
        coordinator.push(changed(random, event) if random.random() < 0.9 else event.SerializeToString())
        result.sent[f"event {event.WhichOneof('event')}"] += 1
    if random.random() < 0.3:
        coordinator.hang_up()
    time.sleep(random.choice((0.0, 0.1, 0.5)))


def _event(coordinator: BadCoordinator, random: Random, number: int) -> pb.AttendResponse:
    """A valid event, with a hostile name for its run in some cases."""
    if random.random() < 0.5:
        method = random.choice(("fedavg", "scaffold"))
        event = pb.AttendResponse(assignment=coordinator.assignment(f"fuzz-{number}", algorithm=method))
        if random.random() < 0.3:
            event.assignment.key.run_id = random.choice(_PATHS)
        event.assignment.training.local_epochs = random.choice((0, 1, 1, 1, 2**32 - 1))
        return event
    return random.choice(
        [each for each in examples(pb.AttendResponse.DESCRIPTOR) if isinstance(each, pb.AttendResponse)]
    )


def _answer(method: str, random: Random, result: DaemonResult) -> Callable[[Message], Answer]:
    details = [examples(kind)[0] for kind in errors_pb2.DESCRIPTOR.message_types_by_name.values()]

    def answer(_: Message) -> Answer:
        result.sent[f"answer {method}"] += 1
        if random.random() < 0.4:
            code = random.choice([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
            return Failure(code, changed(random, random.choice(details)))
        return changed(random, examples(_ANSWERS[method].DESCRIPTOR)[0])

    return answer


def _outside(folder: Path, daemon: Daemon) -> set[Path]:
    """Files beside the daemon's state directory and output, in its parents up to the folder and above it."""
    state = Path(daemon.settings["state_dir"])
    found = {path for path in folder.rglob("*") if state not in {path, *path.parents}}
    return found | {path for parent in (folder.parent, folder.parent.parent) for path in parent.glob("x*")}


def _harm(folder: Path, daemon: Daemon, files: set[Path]) -> list[str]:
    state, harm = Path(daemon.settings["state_dir"]), []
    if daemon.exit_code is not None:
        harm.append(f"the daemon ended with {daemon.exit_code}: {daemon.tail()}")
    if new := _outside(folder, daemon) - files:
        harm.append(f"files outside the state directory: {sorted(map(str, new))[:5]}")
    size = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
    if size > MOST_STATE_BYTES:
        harm.append(f"the state directory has {size} bytes")
    if broken := [*daemon.events("event_broken"), *daemon.events("attendance_broken")]:
        harm.append(f"a fault of the daemon: {str(broken[0])[:1500]}")
    if errors := daemon.errors().strip():
        harm.append(f"on stderr: {errors[-1500:]}")
    return harm
