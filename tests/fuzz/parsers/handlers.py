"""Every method with its interceptor and its handler, on a whole coordinator in this process, without a network.

The inputs name a session and a run that exist, so that most of them get past the first checks. A call that ends with
INTERNAL or UNKNOWN, or not at all, is a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc
import grpc.aio

from fl_server.clients.fleet import Fleet
from fl_server.errors import ServerError, UnknownSessionError
from fl_server.rpc import admin, service
from fl_server.rpc.call_limits import CallLimits
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.store import ledger
from protos.fl.v1 import admin_pb2, admin_pb2_grpc, coordinator_pb2
from tests.fl_server.harness import World
from tests.fuzz.examples import CLIENT, RUN, TASK, examples, upload_parts
from tests.fuzz.mutation import Seed, Stream, parts_of
from tests.fuzz.parser import Parser

SESSION = "s" * 32
"""Stands for the session in inputs; as long as a real one, so that it can be put in its place."""
ENDLESS = {"Attend", "WatchRun", "Watch"}
"""Methods whose responses have no end: this long is waited for each."""
ENDLESS_S = 0.01
ENDS_S = 60.0
MOST_RESPONSES = 8
FEDAVG = {"name": "fedavg", "parameters": {}}
CALLS_OF_A_RUN = 100
"""After these the inputs get a new run, because the old one may have ended."""


class Refused(Exception):
    """The call ended with a status."""


class Called(NamedTuple):
    """A call of the fuzzer."""

    method: str
    requests: Sequence[bytes]


class _Context:
    """The context of one call: its request, and the status that ends it."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        self._requests = iter(requests)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def read(self) -> bytes | object:
        return next(self._requests, grpc.aio.EOF)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        if code in {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}:
            raise AssertionError(f"the call ended with {code.name}: {details}")
        raise Refused(code.name)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Coordinator:
    """A coordinator with a run and a client, and its methods behind their interceptor."""

    def __init__(self, folder: Path) -> None:
        ledger.GATHER_S = 0.0  # calls come one after the other: nothing to gather
        self._loop = asyncio.new_event_loop()
        self._world = World(
            folder, transfers={"calls_per_s": 1e6}, quarantine={"after": 0, "failures": 0}, registrations_per_s=1e6
        )
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        world = await self._world.__aenter__()
        collected = _Collected()
        servicer = admin.AdminService(world.services, world.coordinator)
        admin_pb2_grpc.add_AdminServicer_to_server(servicer, collected)
        self._handlers = [service.handlers(world.service), *collected.handlers]
        self._interceptor = CallInterceptor(CallPolicy(world.services.metrics, CallLimits(64, 1000)))
        self._session, self._run, self._calls = "", RUN, 0
        self._attending = asyncio.create_task(asyncio.sleep(0))

    def close(self) -> None:
        """Stop the client and the coordinator."""

        async def stop() -> None:
            self._attending.cancel()
            await asyncio.gather(self._attending, return_exceptions=True)
            await self._world.__aexit__()

        self._loop.run_until_complete(stop())
        self._loop.close()

    def call(self, method: str, requests: Sequence[bytes]) -> None:
        """Call a method. Raises Refused, or AssertionError for a failure."""
        self._loop.run_until_complete(self._call(method, requests))

    async def _call(self, method: str, requests: Sequence[bytes]) -> None:
        if self._calls % CALLS_OF_A_RUN == 0:
            await self._new_run()
        self._calls += 1
        await self._open_session()
        names = {SESSION: self._session, RUN: self._run}
        given = [_renamed(raw, names) for raw in requests]
        context = _Context(given)
        handler = await self._interceptor.intercept_service(self._continue, cast(Any, _Details(method)))
        assert handler is not None
        name = method.rpartition("/")[2]
        limit = ENDLESS_S if name in ENDLESS else ENDS_S
        try:
            async with asyncio.timeout(limit):
                await _consume(handler, given, context)
        except TimeoutError:
            assert name in ENDLESS, f"{name} did not end in {limit:g} s"

    async def _new_run(self) -> None:
        """A new run in place of all others; their memory is not the fuzzer's subject."""
        coordinator = self._world.coordinator
        for run in coordinator.runs():
            with suppress(ServerError):
                await coordinator.actions.stop(run, "fuzzed", "admin")
            with suppress(ServerError):
                await coordinator.deletions.delete(run.id, "fuzzed", "admin")
        self._run = f"fuzzed-{self._calls // CALLS_OF_A_RUN + 1:05}"
        task = {"name": TASK, "options": {"model": "plain"}}
        await self._world.create(name=self._run, task=task, algorithm=FEDAVG, round={"clients_per_round": 1})
        self._session = ""

    async def _open_session(self) -> None:
        """A session of the client, which an input may have banned, drained or ended."""
        fleet = self._world.fleet
        with suppress(UnknownSessionError):
            fleet.sessions.of_call(self._session)
            return
        with suppress(ServerError):
            await self._world.operators.unban(CLIENT, "admin")
        with suppress(ServerError):
            await self._world.operators.release(CLIENT, "admin")
        request = examples(coordinator_pb2.RegisterRequest.DESCRIPTOR)[0]
        assert isinstance(request, coordinator_pb2.RegisterRequest)
        with suppress(ServerError):
            session, _ = await fleet.register(request)
            self._session = session.id
            self._attending.cancel()
            self._attending = asyncio.create_task(_attend(fleet, session.id))
            await asyncio.sleep(0)

    async def _continue(self, details: Any) -> Any:
        return next(found for handler in self._handlers if (found := handler.service(details)) is not None)


async def _attend(fleet: Fleet, session_id: str) -> None:
    """Be present, so that the client gets work and its uploads are expected."""
    with suppress(ServerError):
        async for _ in fleet.streams.attend(coordinator_pb2.AttendRequest(session_id=session_id)):
            pass


def _renamed(raw: bytes, names: Mapping[str, str]) -> bytes:
    """The bytes with the names that exist now, where both are equally long."""
    for name, now in names.items():
        if len(name) == len(now):
            raw = raw.replace(name.encode(), now.encode())
    return raw


class _Details(NamedTuple):
    method: str
    invocation_metadata: tuple[()] = ()


class _Collected:
    """Takes the handlers that generated code adds to a server."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self.handlers += handlers

    def add_registered_method_handlers(self, *_: object) -> None:
        pass


async def _consume(handler: Any, given: Sequence[bytes], context: _Context) -> None:
    """Run the handler to its end, or up to some responses."""

    async def requests() -> AsyncIterator[Any]:
        for raw in given:
            yield raw if handler.request_deserializer is None else handler.request_deserializer(raw)

    if handler.response_streaming:
        responses = handler.stream_stream(requests(), context)
        try:
            for _ in range(MOST_RESPONSES):
                handler.response_serializer(await anext(responses))
        except StopAsyncIteration:
            return
        finally:
            await responses.aclose()
    else:
        handler.response_serializer(await handler.stream_unary(requests(), context))


def parsers(folder: Path, opened: ExitStack) -> Iterator[Parser]:
    """One for each method of both services."""
    coordinator = Coordinator(folder / "coordinator")
    opened.callback(coordinator.close)
    for module in (coordinator_pb2, admin_pb2):
        for found in module.DESCRIPTOR.services_by_name.values():
            for method in found.methods:
                if is_served(method.name):
                    yield _parser(coordinator, f"/{found.full_name}/{method.name}", method)


_WEIGHTS = {"Register": 0.02, "BanClient": 0.1, "SubmitUpdate": 0.5}
"""Of methods whose inputs take long: another daemon of the same name waits, and a banned client registers again."""


def is_served(method: str) -> bool:
    """Whether a method of the contract has a handler."""
    mine, base = getattr(admin.AdminService, method, None), getattr(admin_pb2_grpc.AdminServicer, method, None)
    return base is None or mine is not base


def _parser(coordinator: Coordinator, path: str, method: Any) -> Parser:
    seeds: list[Seed] = [Stream(upload_parts())] if method.client_streaming else [*examples(method.input_type)]
    for seed in seeds:
        for message in seed.parts if isinstance(seed, Stream) else [seed]:
            _set_session(message)

    def call(raw: bytes) -> None:
        coordinator.call(path, list(parts_of(raw)) if method.client_streaming else [raw])

    return Parser(f"handler{path.replace('/', '.')}", seeds, call, (Refused,), weight=_WEIGHTS.get(method.name, 1.0))


def _set_session(message: Any) -> None:
    """The session in a request, or in the header of an upload."""
    target: Any
    for target in (message, getattr(message, "header", None)):
        if getattr(target, "session_id", ""):
            target.session_id = SESSION
