"""Around every call: who is calling, how long it took, and errors turned into statuses, each in one place.

A method with one request is served as a stream of requests, which is the same on the wire: so role, ban and open calls
are looked at before the request is received, and its size and values before it is parsed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog

from fl_server import errors, identity
from fl_server.identity import ANYBODY, Identity, caller, require_role
from fl_server.metrics import Metrics
from fl_server.rpc.callers import Callers, Place
from fl_server.rpc.expiry import OpenCalls
from fl_server.rpc.requests import DEFAULT, LIMITS, BadRequest, parse
from fl_server.store.base import StoreFull, StoreTaken
from protos.status import status_metadata

log = structlog.get_logger()

CODES: dict[type[Exception], grpc.StatusCode] = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownSessionError: grpc.StatusCode.UNAUTHENTICATED,
    errors.CertificateEnded: grpc.StatusCode.UNAUTHENTICATED,
    errors.Fenced: grpc.StatusCode.ABORTED,
    errors.Contested: grpc.StatusCode.ABORTED,
    errors.NoCommonProtocol: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.NoSuchResource: grpc.StatusCode.NOT_FOUND,
    errors.NoSuchRun: grpc.StatusCode.NOT_FOUND,
    errors.RunExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.NoSuchService: grpc.StatusCode.NOT_FOUND,
    errors.NoSuchClient: grpc.StatusCode.NOT_FOUND,
    errors.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UploadBroken: grpc.StatusCode.DATA_LOSS,
    errors.NotNow: grpc.StatusCode.UNAVAILABLE,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooMany: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Error to status code. An exception that is not here is a fault of ours: INTERNAL, with the cause in the log only."""

_ROLES = {"/fl.v1.Coordinator/": "client", "/fl.v1.Admin/": "admin"}
_STALL_S, _RETRY_S = 60.0, 1.0
Handler = Callable[[Any, grpc.aio.ServicerContext], Any]


@dataclass
class CallPolicy:
    """What the calls of one port have in common."""

    metrics: Metrics | None
    """None: nothing is counted yet."""
    callers: Callers
    setting: str = "listen"
    """By which it is known, in metrics too."""
    refuse: Callable[[Identity], None] = lambda _: None
    """Raises Forbidden for a certificate whose holder may not call now."""
    stall_s: float = _STALL_S
    """A request that does not come within that is given up."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Identity, role, open calls, requests, metrics and errors of every call."""

    def __init__(self, policy: CallPolicy) -> None:
        self._policy = policy
        self._open = OpenCalls()
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}
        """By method: a server has one handler for each, for good."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wrap the method's handler, whatever its kind."""
        method = handler_call_details.method
        if (wrapped := self._wrapped.get(method)) is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        kind = handler.request_streaming, handler.response_streaming
        inner, wrap = _PARTS[kind]
        call = _Call(method, self._policy, self._open, handler.request_deserializer)
        make = grpc.stream_stream_rpc_method_handler if kind[1] else grpc.stream_unary_rpc_method_handler
        return make(
            wrap(call, getattr(handler, inner)),
            # A single request is read as it came, by `_Call.read`. Of a stream of requests that is ours the service
            # brings what reads and counts each.
            request_deserializer=None if not kind[0] else handler.request_deserializer if call.role else call.parsed,
            response_serializer=handler.response_serializer,
        )


@dataclass
class _Counted:
    """How a call ended."""

    code: grpc.StatusCode = grpc.StatusCode.OK


class _Call:
    """What is known of a method, for the wrappers."""

    def __init__(
        self, method: str, policy: CallPolicy, open_calls: OpenCalls, parser: Callable[[bytes], Any] | None
    ) -> None:
        self.method, self.name = method, method.rsplit("/", 1)[-1]
        self.role = next((role for prefix, role in _ROLES.items() if method.startswith(prefix)), "")
        self.policy, self._open, self._parser = policy, open_calls, parser
        self._at_once = LIMITS.get(method, DEFAULT).at_once

    def enter(self, context: grpc.aio.ServicerContext) -> Place:
        """Set the caller, and check all that can be known before its request."""
        peer = context.peer()
        identity.address.set(identity.address_of(peer))
        who = identity.of_connection(context.auth_context())
        caller.set(who)
        who.check_time()
        if self.role:
            require_role(self.role)
            if who is not ANYBODY:
                self.policy.refuse(who)
        if self.policy.callers.is_new(peer) and self.policy.metrics is not None:
            self.policy.metrics.connections_used.labels(self.policy.setting).inc()
        return self.policy.callers.enter(peer if who is ANYBODY else str(who), self.method, self._at_once)

    def while_valid(self) -> AbstractContextManager[None]:
        """For what may be open for long: it ends when the caller's certificate does."""
        return self._open.while_valid(caller.get())

    async def read(self, place: Place, context: grpc.aio.ServicerContext) -> Any:
        """The call's one request. Raises InvalidInput, NotNow."""
        stall_s = self.policy.stall_s
        try:
            async with asyncio.timeout(stall_s):
                raw = await context.read()
        except TimeoutError:
            raise errors.NotNow(f"no request came within {stall_s:g} s", _RETRY_S, routine=True) from None
        if raw is grpc.aio.EOF:
            raise BadRequest("malformed", f"a request of {self.name}", "none")
        with place.listening():
            return self.parsed(raw)

    def parsed(self, raw: bytes) -> Any:
        """A request from its bytes. Raises InvalidInput."""
        return parse(self.method, raw, self._parser)

    @contextmanager
    def counted(self) -> Iterator[_Counted]:
        """Count the call by its code and time, if it is one of ours."""
        counted, started = _Counted(), time.monotonic()
        try:
            yield counted
        finally:
            if self.role and self.policy.metrics is not None:
                seconds = self.policy.metrics.rpc_seconds.labels(self.name, counted.code.name)
                seconds.observe(time.monotonic() - started)

    async def fail(self, context: grpc.aio.ServicerContext, counted: _Counted, error: Exception) -> None:
        """End the call with the status that the error stands for."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        code = counted.code = _code_of(error)
        if isinstance(error, StoreFull | StoreTaken):
            error = errors.NotNow(f"the coordinator cannot write: {error}", 5.0)
        if code is grpc.StatusCode.INTERNAL:
            log.error("rpc_failed", rpc=self.name, peer=identity.address.get(), error=repr(error), exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, f"the coordinator failed in {self.name}: see its log")
        if isinstance(error, BadRequest | errors.TooMany) and self.policy.metrics is not None:
            why = error.why if isinstance(error, BadRequest) else "calls"
            self.policy.metrics.requests_refused.labels(self.policy.setting, why).inc()
        known = error if isinstance(error, errors.ServerError) else None
        # Of what anybody may call without a certificate there is no line: it would be a stranger's to fill the log.
        if self.role and (known is None or not known.routine):
            log.info(
                "rpc_refused", rpc=self.name, code=code.name, caller=str(caller.get()), peer=identity.address.get(),
                error=str(error),
            )  # fmt: skip
        detail = None if known is None else known.detail
        await context.abort(code, str(error), status_metadata(code.value[0], str(error), detail))


def _code_of(error: Exception) -> grpc.StatusCode:
    if isinstance(error, StoreFull | StoreTaken):
        return grpc.StatusCode.UNAVAILABLE
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def _wrap_single(call: _Call, inner: Handler) -> Handler:
    """Requests as they come, one response."""

    async def wrapped(requests: Any, context: grpc.aio.ServicerContext) -> Any:
        with call.counted() as counted:
            try:
                with call.enter(context) as place, place.listening(), call.while_valid():
                    return await inner(requests, context)
            except Exception as error:  # noqa: BLE001 - every error becomes a status, and is logged
                await call.fail(context, counted, error)

    return wrapped


def _wrap_whole(call: _Call, inner: Handler) -> Handler:
    """A call with one request is done whole once it has begun: its caller may hang up, half of it may not be left."""

    async def wrapped(_: Any, context: grpc.aio.ServicerContext) -> Any:
        with call.counted() as counted:
            try:
                place = call.enter(context)
                try:
                    work = asyncio.ensure_future(inner(await call.read(place, context), context))
                except BaseException:
                    place.leave()
                    raise
                work.add_done_callback(lambda _: place.leave())
                return await asyncio.shield(work)
            except Exception as error:  # noqa: BLE001 - every error becomes a status, and is logged
                await call.fail(context, counted, error)

    return wrapped


def _wrap_pushing(call: _Call, inner: Handler) -> Handler:
    """One request, many responses."""

    async def wrapped(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        with call.counted() as counted:
            try:
                with call.enter(context) as place, call.while_valid():
                    async for response in inner(await call.read(place, context), context):
                        yield response
            except Exception as error:  # noqa: BLE001 - every error becomes a status, and is logged
                await call.fail(context, counted, error)

    return wrapped


def _wrap_both(call: _Call, inner: Handler) -> Handler:
    """Requests as they come, many responses."""

    async def wrapped(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        with call.counted() as counted:
            try:
                with call.enter(context), call.while_valid():
                    async for response in inner(requests, context):
                        yield response
            except Exception as error:  # noqa: BLE001 - every error becomes a status, and is logged
                await call.fail(context, counted, error)

    return wrapped


_PARTS: dict[tuple[bool, bool], tuple[str, Callable[[_Call, Handler], Handler]]] = {
    (False, False): ("unary_unary", _wrap_whole),
    (True, False): ("stream_unary", _wrap_single),
    (False, True): ("unary_stream", _wrap_pushing),
    (True, True): ("stream_stream", _wrap_both),
}
"""By whether requests and responses are streams."""
