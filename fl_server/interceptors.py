"""Around every call: who is calling, how long it took, and errors turned into statuses, each in one place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
import grpc.aio
import structlog

from fl_server import errors, identity
from fl_server.identity import caller, require_role
from fl_server.metrics import Metrics
from fl_server.rpc.expiry import OpenCalls
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
    errors.NoSuchClient: grpc.StatusCode.NOT_FOUND,
    errors.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UploadBroken: grpc.StatusCode.DATA_LOSS,
    errors.NotNow: grpc.StatusCode.UNAVAILABLE,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Error to status code. An exception that is not here is a fault of ours: INTERNAL, with the cause in the log only."""

_ROLES = {"/fl.v1.Coordinator/": "client", "/fl.v1.Admin/": "admin"}
Handler = Callable[[Any, grpc.aio.ServicerContext], Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Identity, role, metrics and errors of every call."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
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
        if handler is None or not method.startswith("/fl.v1."):
            return handler
        self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        call = _Call(method, self._metrics, self._open)
        make, inner, wrap = _PARTS[handler.request_streaming, handler.response_streaming]
        return make(
            wrap(call, getattr(handler, inner)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class _Call:
    """What is known of a method, for the wrappers."""

    def __init__(self, method: str, metrics: Metrics, open_calls: OpenCalls) -> None:
        self.name = method.rsplit("/", 1)[-1]
        self.role = next((role for prefix, role in _ROLES.items() if method.startswith(prefix)), "")
        self.metrics = metrics
        self._open = open_calls

    def enter(self, context: grpc.aio.ServicerContext) -> float:
        """Set the caller and check its role; returns the start time."""
        identity.address.set(identity.address_of(context.peer()))
        who = identity.of_connection(context.auth_context())
        caller.set(who)
        who.check_time()
        require_role(self.role)
        return time.monotonic()

    def while_valid(self) -> AbstractContextManager[None]:
        """For what may be open for long: it ends when the caller's certificate does."""
        return self._open.while_valid(caller.get())

    def leave(self, started: float, code: grpc.StatusCode) -> None:
        """Count the call."""
        self.metrics.rpc_seconds.labels(self.name, code.name).observe(time.monotonic() - started)

    async def fail(self, context: grpc.aio.ServicerContext, error: Exception) -> None:
        """End the call with the status that the error stands for."""
        code = _code_of(error)
        if isinstance(error, StoreFull | StoreTaken):
            error = errors.NotNow(f"the coordinator cannot write: {error}", 5.0)
        if code is grpc.StatusCode.INTERNAL:
            log.error("rpc_failed", rpc=self.name, error=repr(error), exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, f"the coordinator failed in {self.name}: see its log")
        known = error if isinstance(error, errors.ServerError) else None
        if known is None or not known.routine:
            log.info("rpc_refused", rpc=self.name, code=code.name, caller=str(caller.get()), error=str(error))
        detail = None if known is None else known.detail
        await context.abort(code, str(error), status_metadata(code.value[0], str(error), detail))


def _code_of(error: Exception) -> grpc.StatusCode:
    if isinstance(error, StoreFull | StoreTaken):
        return grpc.StatusCode.UNAVAILABLE
    return CODES.get(type(error), grpc.StatusCode.INTERNAL)


def _wrap_whole(call: _Call, inner: Handler) -> Handler:
    """A call with one request is done whole once it has begun: its caller may hang up, half of it may not be left."""

    async def whole(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await asyncio.shield(inner(request, context))

    return _wrap_single(call, whole)


def _wrap_single(call: _Call, inner: Handler) -> Handler:
    async def wrapped(request: Any, context: grpc.aio.ServicerContext) -> Any:
        started, code = time.monotonic(), grpc.StatusCode.OK
        try:
            call.enter(context)
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - every error becomes a status, and is logged
            code = _code_of(error)
            await call.fail(context, error)
        finally:
            call.leave(started, code)

    return wrapped


def _wrap_upload(call: _Call, inner: Handler) -> Handler:
    """A stream of requests is as long as its sender makes it."""

    async def upload(requests: Any, context: grpc.aio.ServicerContext) -> Any:
        with call.while_valid():
            return await inner(requests, context)

    return _wrap_single(call, upload)


def _wrap_stream(call: _Call, inner: Handler) -> Handler:
    async def wrapped(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        started, code = time.monotonic(), grpc.StatusCode.OK
        try:
            call.enter(context)
            with call.while_valid():
                async for response in inner(request, context):
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - every error becomes a status, and is logged
            code = _code_of(error)
            await call.fail(context, error)
        finally:
            call.leave(started, code)

    return wrapped


_PARTS: dict[
    tuple[bool, bool], tuple[Callable[..., grpc.RpcMethodHandler], str, Callable[[_Call, Handler], Handler]]
] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary", _wrap_whole),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary", _wrap_upload),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream", _wrap_stream),
}
