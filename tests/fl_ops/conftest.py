"""A fake admin port on loopback, the command `fl` in this process, and a small task for simulations."""

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

from fl_ops.commands.cli import app
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from protos.status import status_metadata

Fl = Callable[..., Result]
"""Runs `fl` with these arguments."""
Serve = Callable[..., "FakeAdmin"]
"""Starts a fake admin port, with TLS if credentials are given."""


@dataclass
class FakeAdmin:
    """Responses by method name: a message, a list of messages for a stream, or an error."""

    responses: dict[str, Any] = field(default_factory=dict)
    requests: list[Message] = field(default_factory=list)
    identities: list[Any] = field(default_factory=list)
    address: str = ""

    def fail(self, method: str, code: grpc.StatusCode, text: str, detail: Message | None = None) -> None:
        """From now on `method` ends with this status."""
        self.responses[method] = (code, text, detail)

    def respond(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        """Return the response for `method`, or end the call with its error. The rounds are those of "GetRun"."""
        self.requests.append(request)
        self.identities.append(context.auth_context().get("x509_subject_alternative_name"))
        response = self.responses["GetRun" if method == "ListRounds" else method]
        if isinstance(response, tuple):
            code, text, detail = response
            context.set_trailing_metadata(status_metadata(code.value[0], text, detail))
            context.abort(code, text)
        if method == "ListRounds":
            rounds = [row for row in response.rounds if row.round >= request.first_round]
            return admin_pb2.ListRoundsResponse(rounds=rounds)
        if method == "GetRun" and not request.with_rounds:
            return admin_pb2.GetRunResponse(run=response.run)
        return response


def _servicer(fake: FakeAdmin) -> admin_pb2_grpc.AdminServicer:
    servicer = admin_pb2_grpc.AdminServicer()
    for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods:

        def handle(request: Message, context: grpc.ServicerContext, name: str = method.name) -> Any:
            return fake.respond(name, request, context)

        def stream(request: Message, context: grpc.ServicerContext, name: str = method.name) -> Iterator[Any]:
            yield from fake.respond(name, request, context)

        setattr(servicer, method.name, stream if method.server_streaming else handle)
    return servicer


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a fake on a free loopback port, in plain text or with credentials."""
    servers: list[grpc.Server] = []

    def start(credentials: grpc.ServerCredentials | None = None) -> FakeAdmin:
        fake, server = FakeAdmin(), grpc.server(ThreadPoolExecutor(2))
        add_servicer: Any = admin_pb2_grpc.add_AdminServicer_to_server  # generated without types
        add_servicer(_servicer(fake), server)
        add = server.add_insecure_port if credentials is None else lambda at: server.add_secure_port(at, credentials)
        fake.address = f"127.0.0.1:{add('127.0.0.1:0')}"
        server.start()
        servers.append(server)
        return fake

    yield start
    for server in servers:
        server.stop(None).wait()


@pytest.fixture
def admin(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """A fake in plain text; environment variables give `fl` its address."""
    fake = serve()
    monkeypatch.setenv("FL_ADMIN", fake.address)
    monkeypatch.setenv("FL_INSECURE", "1")
    return fake


@pytest.fixture
def points_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the task points:Points importable."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def fl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fl:
    """Runs `fl` in an empty folder, without the user's own settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
