"""A coordinator's admin port on loopback with canned answers, and the command run against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from typer.testing import CliRunner, Result

from fl_ops.cli import app
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from protos.status import status_metadata

Fl = Callable[..., Result]


@dataclass
class FakeAdmin:
    """Answers by method name: a message, a list of messages for a stream, or a failure to end with."""

    answers: dict[str, Any] = field(default_factory=dict)
    requests: list[Message] = field(default_factory=list)
    identities: list[Any] = field(default_factory=list)
    address: str = ""

    def fail(self, method: str, code: grpc.StatusCode, text: str, detail: Message | None = None) -> None:
        """From now on `method` ends with this status."""
        self.answers[method] = (code, text, detail)

    def answer(self, method: str, request: Message, context: grpc.ServicerContext) -> Any:
        """What the canned answer for `method` is; a failure ends the call."""
        self.requests.append(request)
        self.identities.append(context.auth_context().get("x509_subject_alternative_name"))
        answer = self.answers[method]
        if isinstance(answer, tuple):
            code, text, detail = answer
            context.set_trailing_metadata(status_metadata(code.value[0], text, detail))
            context.abort(code, text)
        return answer


def _servicer(fake: FakeAdmin) -> admin_pb2_grpc.AdminServicer:
    servicer = admin_pb2_grpc.AdminServicer()
    for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods:

        def handle(request: Message, context: grpc.ServicerContext, name: str = method.name) -> Any:
            return fake.answer(name, request, context)

        def stream(request: Message, context: grpc.ServicerContext, name: str = method.name) -> Iterator[Any]:
            yield from fake.answer(name, request, context)

        setattr(servicer, method.name, stream if method.server_streaming else handle)
    return servicer


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeAdmin]]:
    """Starts a fake on a free loopback port, in plain text or with credentials."""
    servers: list[grpc.Server] = []

    def start(credentials: grpc.ServerCredentials | None = None) -> FakeAdmin:
        fake, server = FakeAdmin(), grpc.server(ThreadPoolExecutor(2))
        admin_pb2_grpc.add_AdminServicer_to_server(_servicer(fake), server)
        add = server.add_insecure_port if credentials is None else lambda at: server.add_secure_port(at, credentials)
        fake.address = f"127.0.0.1:{add('127.0.0.1:0')}"
        server.start()
        servers.append(server)
        return fake

    yield start
    for server in servers:
        server.stop(None).wait()


@pytest.fixture
def admin(serve: Callable[..., FakeAdmin], monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """A fake in plain text, which `fl` finds by the environment."""
    fake = serve()
    monkeypatch.setenv("FL_ADMIN", fake.address)
    monkeypatch.setenv("FL_INSECURE", "1")
    return fake


@pytest.fixture
def fl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fl:
    """Runs `fl` with these arguments in an empty folder, apart from the user's own settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
