"""One caller of a live coordinator: a client and an operator with certificates, who send changed requests.

Its session and its run exist, so that most requests get past the first checks. Its runs select no honest client.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError, Message

from fl_ops.admin.client import AdminClient
from fl_ops.errors import OpsError
from protos.digests import digest_message
from protos.fl.v1 import admin_pb2, coordinator_pb2
from protos.wire import client_options
from tests.fuzz.examples import DATA, LAYOUT
from tests.fuzz.live.methods import CLIENTS, DEVICES, FIRST_ONLY, OPERATORS, PROBES, Method
from tests.fuzz.mutation import Seed, Stream, changed, parts_of, random_for
from tests.hostile.federation import Federation
from tests.processes.certificates import credentials
from tests.processes.federation import TASK, run_spec
from tests.processes.raw_client import RawClient

ENDS_S = 60.0
"""A call without an end after this time hangs."""
MOST_RESPONSES = 64
SESSIONS = 0.9
"""Share of the calls that name a valid session."""
FAILURES = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED})
_RUN: dict[str, Any] = {
    "task": {"name": TASK, "options": {"model": "plain"}},
    "algorithm": {"name": "fedavg"},
    "round": {"clients_per_round": 1, "min_clients": 1},
}


@dataclass(frozen=True, slots=True)
class LiveFailure:
    """A call that ended as no call may."""

    method: str
    code: str
    details: str
    raw: bytes
    number: int


@dataclass(slots=True)
class Called:
    """Counts of one caller."""

    calls: Counter[str] = field(default_factory=Counter)
    """By port and method."""
    codes: Counter[str] = field(default_factory=Counter)
    """By method and status."""
    failures: list[LiveFailure] = field(default_factory=list)

    def add(self, other: Called) -> None:
        """Add another's counts."""
        self.calls += other.calls
        self.codes += other.codes
        self.failures += other.failures


class Caller:
    """A context manager. One thread uses it."""

    def __init__(self, federation: Federation, name: str, seed: int) -> None:
        self.name, self._seed, self._federation = name, seed, federation
        self.called = Called()
        settings = federation.server.settings
        root = grpc.ssl_channel_credentials(federation.pki.ca.read_bytes())
        client, operator = (credentials(federation.hostile(name, role)) for role in ("client", "admin"))
        self._channels = {
            CLIENTS: grpc.secure_channel(str(settings[CLIENTS]), client, list(client_options())),
            OPERATORS: grpc.secure_channel(str(settings[OPERATORS]), operator, list(client_options())),
            PROBES: grpc.insecure_channel(str(settings[PROBES]), list(client_options())),
            DEVICES: grpc.secure_channel(str(settings[DEVICES]), root, list(client_options())),
        }
        self._token = ""
        self._client = RawClient(str(settings[CLIENTS]), name, client)
        self._session = ""
        self._run, self._runs, self._wants_session = "", 0, False
        self._model = digest_message(LAYOUT.digest(DATA))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.__exit__()
        for channel in self._channels.values():
            channel.close()

    def call(self, method: Method) -> None:
        """Make the next call of a method, and count how it ended."""
        key = f"{method.port} {method.path}"
        number = self.called.calls[key]
        random = random_for(self._seed, f"{self.name} {key}", number)
        seed = self._own(random.choice(method.seeds), random)
        raw = self._harmless(method, changed(random, seed))
        requests = list(parts_of(raw)) if method.streams_in else [raw]
        if self._wants_session:
            self._wants_session = False
            self._attend()
        code, details = self.send(method, requests)
        self._wants_session |= method.port == CLIENTS and code is grpc.StatusCode.UNAUTHENTICATED
        self.called.calls[key] += 1
        self.called.codes[f"{method.name} {code.name}"] += 1
        if code in FAILURES:
            self.called.failures.append(LiveFailure(method.path, code.name, details, raw, number))

    def send(self, method: Method, requests: Sequence[bytes]) -> tuple[grpc.StatusCode, str]:
        """Make one call with these bytes. Returns its status, and the text of a refusal."""
        channel: Any = self._channels[method.port]
        given: Any = iter(requests) if method.streams_in else requests[0]
        kinds = {(False, False): "unary_unary", (True, False): "stream_unary", (False, True): "unary_stream"}
        make = getattr(channel, kinds.get((method.streams_in, method.streams_out), "stream_stream"))
        rpc = make(method.path, request_serializer=None, response_deserializer=None)
        try:
            if not method.streams_out:
                rpc(given, timeout=ENDS_S)
                return grpc.StatusCode.OK, ""
            return _taken(rpc(given, timeout=ENDS_S), 1 if method.name in FIRST_ONLY else MOST_RESPONSES)
        except grpc.RpcError as error:
            call: Any = error
            return call.code(), call.details() or ""

    def prepare(self) -> None:
        """A new run of this caller in place of all its runs, a new session, and the session's assignment."""
        self._runs += 1
        self._wants_session = False
        with self._federation.server.admin() as admin:
            with suppress(OpsError):
                admin.call(admin_pb2.UnbanClientRequest(client_id=self.name), admin_pb2.UnbanClientResponse)
            with suppress(OpsError):
                admin.call(admin_pb2.ReleaseClientRequest(client_id=self.name), admin_pb2.ReleaseClientResponse)
            for run in admin.runs.list_runs():
                if run.spec.labels.get("site") in {self.name, "fuzz"}:
                    self._remove(admin, run)
            with suppress(OpsError):
                wanted = [admin_pb2.EnrollmentSpec(name=f"{self.name}-{self._runs}")]
                request = admin_pb2.CreateEnrollmentsRequest(specs=wanted)
                self._token = admin.call(request, admin_pb2.CreateEnrollmentsResponse).created[0].token
            with suppress(OpsError):
                spec = run_spec(f"{self.name}-{self._runs}", **_RUN, labels={"site": self.name})
                self._run = admin.runs.create_run(spec).run.run_id
        self._attend()

    @staticmethod
    def _remove(admin: AdminClient, run: admin_pb2.RunStatus) -> None:
        with suppress(OpsError):  # another caller may remove it now
            if not run.HasField("ended"):
                admin.runs.stop_run(run.run_id, "fuzzed")
        with suppress(OpsError):
            admin.call(admin_pb2.DeleteRunRequest(run_id=run.run_id, reason="fuzzed"), admin_pb2.DeleteRunResponse)

    def _attend(self) -> None:
        """Open a session, and attend it until the next one."""
        self._session = ""
        with suppress(grpc.RpcError):
            self._client.register(labels={"site": self.name})
            self._session = self._client.session_id
            threading.Thread(target=self._take, args=(self._session,), daemon=True).start()

    def _take(self, session: str) -> None:
        """Read a session's events, for the digest of the model that its assignments name."""
        with suppress(grpc.RpcError, ValueError):  # a closed channel raises ValueError
            for event in self._client.stub.Attend(coordinator_pb2.AttendRequest(session_id=session)):
                if event.HasField("assignment"):
                    self._model = event.assignment.resources[0].digest

    def _own(self, seed: Seed, random: Random) -> Seed:
        """The seed with this caller's session, run and client in place of the examples' ones."""
        session = self._session if random.random() < SESSIONS else "no-such-session"
        if isinstance(seed, Stream):
            return Stream([self._named(part, session) if isinstance(part, Message) else part for part in seed.parts])
        return self._named(seed, session) if isinstance(seed, Message) else seed

    def _named(self, message: Message, session: str) -> Message:
        """A copy with other names: they are replaced in the text fields with these names, at any depth."""
        copy = type(message)()
        copy.CopyFrom(message)
        if isinstance(copy, coordinator_pb2.FetchModelRequest):
            copy.digest.CopyFrom(self._model)
        _rename(copy, {"session_id": session, "client_id": self.name, "run_id": self._run, "token": self._token})
        return copy

    def _harmless(self, method: Method, raw: bytes) -> bytes:
        """The request without what would touch honest runs: a run that could select their clients."""
        if method.name != "CreateRun":
            return raw
        try:
            request = admin_pb2.CreateRunRequest.FromString(raw)
        except DecodeError:
            return raw
        if request.HasField("spec"):
            request.spec.labels["site"] = "fuzz"
            return request.SerializeToString()
        return raw


def _taken(responses: Any, most: int) -> tuple[grpc.StatusCode, str]:
    """Take some responses, and hang up."""
    for number, _ in enumerate(responses, start=1):
        if number >= most:
            responses.cancel()
            break
    return grpc.StatusCode.OK, ""


def _rename(message: Message, names: dict[str, str]) -> None:
    for field_, value in message.ListFields():
        if field_.message_type is not None and not field_.message_type.GetOptions().map_entry:
            for inner in value if field_.is_repeated else [value]:
                _rename(inner, names)
        elif field_.name in names and not field_.is_repeated:
            setattr(message, field_.name, names[field_.name])
