"""An operator's certificate is used to request programs and impossible values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from protos.wire import client_options
from tests.hostile.target import Target, Until
from tests.processes.certificates import credentials
from tests.processes.federation import TASK, run_spec
from tests.processes.process import TIMEOUT_S

MARKER = "hostile-marker"
"""A file in the coordinator's working directory that none of the programs below may create."""
MODULE = "evil_task"
"""A module in that folder that creates the file on import, if the test put it there."""

Call = tuple[str, Message]
"""A method of the Admin service, and its request."""


def evil_module(marker: str) -> str:
    """The text of the module."""
    return f"import pathlib\n\npathlib.Path({marker!r}).touch()\n\nclass Evil:\n    version = '1'\n"


def programs() -> Iterator[admin_pb2.RunSpec]:
    """Runs with a program, an unlisted module, or a class that is no task as their task."""
    touch = ["touch", MARKER]
    for name, options in (
        ("subprocess:run", {"args": touch}),
        ("subprocess:Popen", {"args": touch}),
        ("subprocess:getoutput", {"cmd": " ".join(touch)}),
        ("os:system", {"command": " ".join(touch)}),
        ("builtins:exec", {"source": f"open({MARKER!r}, 'w')"}),
        ("builtins:open", {"file": MARKER, "mode": "w"}),
        ("pathlib:Path", {}),
        ("importlib:import_module", {"name": MODULE}),
        (f"{MODULE}:Evil", {}),
        ("tests.processes.forks:Forked", {}),
    ):
        yield run_spec("shell", task={"name": name, "options": options}, round={"clients_per_round": 3})


def impossible_values(run_id: str) -> Iterator[Call]:
    """Requests that a coordinator never accepts."""
    yield "ExtendRun", admin_pb2.ExtendRunRequest(run_id=run_id, rounds=2**32 - 1)
    yield "ExtendRun", admin_pb2.ExtendRunRequest(run_id=run_id, rounds=1, wall_time_s=math.nan)
    yield "ExtendRun", admin_pb2.ExtendRunRequest(run_id=run_id, wall_time_s=1e300)
    yield "ExportModel", admin_pb2.ExportModelRequest(run_id=run_id, round="9" * 5000)
    yield "ListHistory", admin_pb2.ListHistoryRequest(before_number=-5)
    for change in (_infinite_parameter, _endless_deadline, _odd_name, _odd_label, _deep_options):
        spec = run_spec("impossible")
        change(spec)
        yield "CreateRun", admin_pb2.CreateRunRequest(spec=spec)


def _infinite_parameter(spec: admin_pb2.RunSpec) -> None:
    spec.algorithm.parameters.fields["alpha"].number_value = math.inf


def _endless_deadline(spec: admin_pb2.RunSpec) -> None:
    spec.round.deadline_s = 1e100


def _odd_name(spec: admin_pb2.RunSpec) -> None:
    spec.name = "\x1b[2J\0" + "x" * 10_000


def _odd_label(spec: admin_pb2.RunSpec) -> None:
    spec.labels["\x1b[31m"] = "\0"


def _deep_options(spec: admin_pb2.RunSpec) -> None:
    inner = spec.task.options
    for _ in range(25):
        inner = inner.fields["a"].struct_value
    inner.fields["a"].bool_value = True


def call(channel: grpc.Channel, method: str, request: Message) -> grpc.StatusCode:
    """The status of one call; a stream is read to its end."""
    stub: Callable[..., Any] = getattr(admin_pb2_grpc.AdminStub(channel), method)
    try:
        answer = stub(request, timeout=TIMEOUT_S)
        if not isinstance(answer, Message):
            for _ in answer:
                pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def admin_channel(target: Target) -> grpc.Channel:
    """A channel to the operators' port with the attacker's certificate; a context manager."""
    return grpc.secure_channel(target.admin_listen, credentials(target.certificates), list(client_options()))


def attack(target: Target, until: Until) -> None:
    """One program after the other, and between them the impossible values and exports of every run there is."""
    with admin_channel(target) as channel:
        while not until():
            for spec in programs():
                call(channel, "CreateRun", admin_pb2.CreateRunRequest(spec=spec))
            for run_id in _runs(channel):
                for method, request in impossible_values(run_id):
                    call(channel, method, request)
                call(channel, "ExportModel", admin_pb2.ExportModelRequest(run_id=run_id))
            time.sleep(0.02)


def _runs(channel: grpc.Channel) -> list[str]:
    try:
        listed = admin_pb2_grpc.AdminStub(channel).ListRuns(admin_pb2.ListRunsRequest(), timeout=TIMEOUT_S)
    except grpc.RpcError:
        return []
    return [run.run_id for run in listed.runs if run.spec.task.name == TASK]
