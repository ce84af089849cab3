"""Callers that claim to be workers, and workers that lie: what the coordinator believes, and what it finds out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_ops.admin.settings import Certificates
from protos.fl.v1 import errors_pb2, training_pb2, worker_pb2_grpc
from protos.fl.v1 import worker_pb2 as pb
from protos.wire import client_options
from tests.processes.certificates import Pki, credentials, server_section
from tests.processes.federation import Coordinator, SecureCoordinator
from tests.processes.process import TIMEOUT_S, Workspace, eventually
from tests.processes.raw_client import HALF_BYTES, RawClient, Update, detail, halting, messages
from tests.processes.workers import Worker, section

ONE = {"clients_per_round": 1, "min_clients": 1}


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A folder with the processes of one test."""
    with Workspace(tmp_path) as workspace:
        yield workspace


@contextmanager
def stub_for(server: Coordinator, certificates: Certificates | None = None) -> Iterator[Any]:
    """The Workers service of a coordinator."""
    address, options = str(server.settings["workers"]["listen"]), list(client_options())
    if certificates is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, credentials(certificates), options)
    with channel:
        yield worker_pb2_grpc.WorkersStub(channel)


def said(caller: pb.Caller, update: Update, *parts: pb.ReceiveUpdateRequest) -> Iterator[pb.ReceiveUpdateRequest]:
    """What a worker says of an update."""
    yield pb.ReceiveUpdateRequest(opening=pb.UploadOpening(caller=caller, header=update.header))
    yield from parts


def assigned(server: Coordinator, client: RawClient, run: str) -> Update:
    """A correct update of a client that is drawn alone."""
    label = {"test": run}
    client.register(labels=label)
    events = client.attend()
    server.create(run, round=ONE, stop={"rounds": 1}, labels=label)
    return client.update(next(event for event in events if event.HasField("assignment")).assignment)


def refusal(call: Any) -> grpc.RpcError:
    """The error of a call."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: grpc.RpcError = caught.value
    return error


def test_only_a_workers_certificate_opens_the_service(workspace: Workspace) -> None:
    """A client's, an operator's and the coordinator's own certificate are refused in every method."""
    pki = Pki(workspace.folder / "pki")
    server = SecureCoordinator(workspace, pki, {"workers": section()}).serve()
    for role in ("client", "admin", "operator"):
        with stub_for(server, pki.issue(role, "w")) as stub:
            attempts = (
                stub.Serve(pb.ServeRequest(), timeout=TIMEOUT_S),
                stub.ReceiveUpdate(iter([pb.ReceiveUpdateRequest()]), timeout=TIMEOUT_S),
                stub.SendResource(iter([pb.SendResourceRequest()]), timeout=TIMEOUT_S),
                stub.FetchResource(pb.FetchResourceRequest(), timeout=TIMEOUT_S),
            )
            for call in attempts:
                error = refusal(call)
                assert error.code() is grpc.StatusCode.PERMISSION_DENIED
                found = detail(error)
                assert isinstance(found, errors_pb2.NotAllowed)
                assert list(found.roles) == ["worker"]


def test_clients_and_operators_are_the_clients_of_a_worker(workspace: Workspace) -> None:
    """A worker serves the holder of a client's certificate under its own name only. A ban ends what is under way."""
    pki = Pki(workspace.folder / "pki")
    server = SecureCoordinator(workspace, pki, {"workers": section()}).serve()
    Worker(workspace, server, "worker", {"tls": server_section(pki.issue("worker", "w"))}).serve()
    serve, own = str(server.settings["workers"]["serve"]), credentials(pki.issue("client", "raw"))
    with RawClient(server.address, "raw", own) as control, RawClient(serve, "raw", own) as data:
        update = assigned(server, control, "own")
        data.session_id = control.session_id
        other = credentials(pki.issue("client", "other"))
        with RawClient(serve, "other", other) as stranger, pytest.raises(grpc.RpcError) as stolen:
            stranger.submit(update)
        assert (stolen.value.code(), "client:other" in str(stolen.value.details())) == (
            grpc.StatusCode.PERMISSION_DENIED,
            1,
        )
        with (
            RawClient(serve, "x", credentials(pki.issue("admin", "x"))) as admin,
            pytest.raises(grpc.RpcError) as caught,
        ):
            admin.submit(update)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        sending = data.stub.SubmitUpdate.future(halting(messages(update, 64), threading.Event()))
        eventually(lambda: data.query(update).kept_bytes == HALF_BYTES, "half of it is kept")
        with server.admin() as operator:
            operator.clients.ban_client("raw", "it lies")
        assert sending.exception(TIMEOUT_S).code() is grpc.StatusCode.PERMISSION_DENIED
        spool = Path(server.settings["state_dir"]) / "spool"
        eventually(lambda: not list(spool.rglob("*.part")), "what it had sent is gone")
        with pytest.raises(grpc.RpcError, match="it lies") as banned:
            data.submit(update)
        assert banned.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_an_update_of_a_client_without_an_assignment_is_refused(workspace: Workspace) -> None:
    """A worker's word makes no client a member of a cohort."""
    server = Coordinator(workspace, settings={"workers": section()}).serve()
    with RawClient(server.address, "drawn") as drawn, RawClient(server.address, "stranger") as stranger:
        update = assigned(server, drawn, "mine")
        stranger.register()
        update.header.session_id = stranger.session_id
        with stub_for(server) as stub:
            (answer,) = stub.ReceiveUpdate(said(pb.Caller(), update), timeout=TIMEOUT_S)
        assert answer.receipt.reason == training_pb2.REFUSAL_REASON_NOT_ASSIGNED
        assert server.run("mine").admitted == 0


@pytest.mark.parametrize("data", [b"", b"other bytes"], ids=["none", "other"])
def test_bytes_that_a_worker_did_not_write_are_found(workspace: Workspace, data: bytes) -> None:
    """A worker vouches for an update that is not there. The reducer refuses it, and the run asks for another."""
    server = Coordinator(workspace, settings={"workers": section()}).serve()
    with RawClient(server.address, "victim") as client, stub_for(server) as stub:
        update = assigned(server, client, "lied")
        header = update.header
        if data:
            name = f"victim.{header.digest.value.hex()}.update"
            path = Path(server.settings["state_dir"]) / "spool/run-lied/round-000000/exchange-0" / name
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
        content = pb.UploadContent(digest=header.digest.value, squares=[1.0] * len(header.payloads[0].manifest.tensors))
        parts: Sequence[pb.ReceiveUpdateRequest] = (
            pb.ReceiveUpdateRequest(written=header.size_bytes),
            pb.ReceiveUpdateRequest(content=content),
            pb.ReceiveUpdateRequest(place=pb.UploadPlace()),
        )
        answers = list(stub.ReceiveUpdate(said(pb.Caller(), update, *parts), timeout=TIMEOUT_S))
        assert answers[-1].receipt.admitted
        why = server.logged("culprit_dropped", run="lied")["why"]
        assert "expected bytes with the digest" in why
        assert (server.run("lied").rounds_done, "client_quarantined" in server.history("victim")) == (0, False)


def test_a_message_out_of_order_ends_the_call(workspace: Workspace) -> None:
    """A place before the content, and buffers of another size, are refused; nothing is admitted."""
    server = Coordinator(workspace, settings={"workers": section()}).serve()
    with RawClient(server.address, "odd") as client, stub_for(server) as stub:
        update = assigned(server, client, "odd")
        early = pb.ReceiveUpdateRequest(place=pb.UploadPlace())
        content = pb.ReceiveUpdateRequest(content=pb.UploadContent(digest=update.header.digest.value))
        long = pb.ReceiveUpdateRequest(buffers=b"1")
        for parts in ((early,), (long, content)):
            error = refusal(stub.ReceiveUpdate(said(pb.Caller(), update, *parts), timeout=TIMEOUT_S))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert server.run("odd").admitted == 0
        assert client.submit(update).admitted
