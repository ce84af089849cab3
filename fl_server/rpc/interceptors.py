"""Wraps every call: sets the caller, checks limits and the request, measures the time, and turns errors into statuses.

A method with one request is served as a stream of requests, which is the same on the wire. So role, ban and open calls
are checked before the request is received, and its size and values before it is parsed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc
import grpc.aio
import structlog

from fl_server import errors, identity
from fl_server.audit.calls import Recorded, RecordedCall, code_of, record_of
from fl_server.audit.log import AuditLog
from fl_server.clients.client_records import ClientRecords
from fl_server.enrollment.grants import Revocations
from fl_server.errors import Forbidden, Unauthenticated
from fl_server.identity import ANYBODY, Identity, caller
from fl_server.metrics import Metrics
from fl_server.rpc.call_limits import BadRequest, CallLimits, ExpiringCalls, OpenCall, parse
from fl_server.rpc.methods import EVERYONE, METHODS, WORKERS, Method, RequestLimit, ordered, roles_text
from fl_server.store.errors import StoreFull, StoreTakenOver
from protos.status import status_metadata
from protos.wire import BROWSER_ADDRESS

log = structlog.get_logger()

_STALL_S, _RETRY_S = 60.0, 1.0
_LEDGER_RETRY_S = 5.0
"""Wait after a call that could not be written to the ledger."""
_SCHEME = "bearer "
_MOST_ADDRESS = 64
_IDENTITY = (Forbidden, errors.CertificateEnded, Unauthenticated)
"""Errors that are recorded in the audit log for every service."""
_begun: ContextVar[bool] = ContextVar("begun", default=False)
"""Whether the current call has a request that was carried out: then its end is recorded with its work."""
Context = grpc.aio.ServicerContext[Any, Any]
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handler = Callable[[Any, Context], Any]
"""The function behind a method."""


class Tokens(Protocol):
    """Verifies tokens; `oidc.tokens.TokenVerifier`, or another in tests."""

    async def identity(self, token: str) -> Identity:
        """The holder of a token. Raises Unauthenticated, Forbidden, NotNow."""
        ...


@dataclass
class CallPolicy:
    """Settings of all calls of one port."""

    metrics: Metrics | None
    """None: calls are not counted."""
    limits: CallLimits
    setting: str = "listen"
    """The setting that names the port, also in metrics."""
    clients: ClientRecords | None = None
    """Refuses banned clients; None: no client is banned."""
    revocations: Revocations | None = None
    """None: no certificate is revoked."""
    stall_s: float = _STALL_S
    """A request that does not come within this time is given up."""
    audit: AuditLog | None = None
    """None: calls are not recorded."""
    trusts_everybody: bool = False
    """Whether a caller without an identity may call every method of the port."""
    tokens: Tokens | None = None
    """Verifies bearer tokens, where callers have these in place of certificates."""
    names_addresses: bool = False
    """Whether its one caller names the address that it calls for in each call, as the web process does."""
    methods: Mapping[str, Method] = field(default_factory=lambda: METHODS)
    """Those that the port serves."""


def require_role(who: Identity, allowed: frozenset[str] | None, *, trusts_everybody: bool) -> None:
    """Raise unless the caller has one of the roles.

    Args:
        who: the caller.
        allowed: the method's row; None: it has none.
        trusts_everybody: whether a caller without an identity may call every method that has a row.

    Raises:
        Unauthenticated: the caller has no identity.
        Forbidden: none of its roles is allowed, or the method has no row.
    """
    if allowed is None:
        raise Forbidden(str(who), "a row for this method in the table of roles")
    if not allowed.isdisjoint(who.roles) or (trusts_everybody and who is ANYBODY):
        return
    if who is ANYBODY:
        sources = "a certificate (admin_listen) or a token (token_listen)" if "admin" in allowed else "a certificate"
        raise Unauthenticated(f"needed: {roles_text(allowed)}, by {sources}")
    raise Forbidden(str(who), roles_text(allowed), ordered(allowed))


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Identity, role, open calls, requests, metrics and errors of every call."""

    def __init__(self, policy: CallPolicy) -> None:
        self._policy = policy
        self._open = ExpiringCalls()
        self._wrapped: dict[str, MethodHandler] = {}
        """Wrapped handlers by method: a server never changes them."""

    def end_denied(self) -> None:
        """End the open calls whose callers' certificates are revoked now."""
        revocations = self._policy.revocations
        ended = 0 if revocations is None else self._open.end_denied(revocations)
        if ended and self._policy.metrics is not None:
            self._policy.metrics.revoked_calls.labels(self._policy.setting).inc(ended)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Wrap the method's handler."""
        method = handler_call_details.method
        if method not in self._wrapped:
            if (handler := await continuation(handler_call_details)) is None:
                return None
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: MethodHandler) -> MethodHandler:
        kind = handler.request_streaming, handler.response_streaming
        inner, wrap = _WRAPPERS[kind]
        call = _Call(method, self._policy, self._open, handler.request_deserializer)
        make = grpc.stream_stream_rpc_method_handler if kind[1] else grpc.stream_unary_rpc_method_handler
        return make(
            wrap(call, call.audited.recording(getattr(handler, inner), streams=kind[1])),
            # `_Call.read` parses a single request. Each message of a stream is checked here, or by the method's own
            # deserializer.
            request_deserializer=None
            if not kind[0]
            else call.parsed
            if call.is_public or call.is_admin or method.startswith(WORKERS)
            else handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class AuditedMethod:
    """Records the calls of one method in the audit log."""

    def __init__(self, name: str, auditor: AuditLog | None, recorded: Recorded | None) -> None:
        """auditor: None records nothing. recorded: None: only calls that are refused for their identity have a row."""
        self._auditor, self._name, self._recorded = auditor, name, recorded

    def recording(self, inner: Handler, *, streams: bool) -> Handler:
        """The handler of a method, with its request and result recorded. streams: whether it has many responses."""
        auditor, recorded = self._auditor, self._recorded
        if auditor is None or recorded is None:
            return inner

        def begin(request: Any, context: Any) -> Any:
            _begun.set(True)
            call = RecordedCall(auditor, self._name, recorded, request)
            return call.stream(inner(request, context)) if streams else call.answer(inner, context)

        return begin

    def refused(self, error: Exception) -> None:
        """The call ended with this error: record it unless its work did."""
        if self._auditor is None or _begun.get() or (self._recorded is None and not isinstance(error, _IDENTITY)):
            return
        self._auditor.record_refusal(record_of(self._name, "", code_of(error).name.lower(), str(error)))


class _Call:
    """One method, for the wrappers below."""

    def __init__(
        self, method: str, policy: CallPolicy, open_calls: ExpiringCalls, parser: Callable[[bytes], Any] | None
    ) -> None:
        self.method, self.name = method, method.rsplit("/", 1)[-1]
        known = policy.methods.get(method)
        self._roles = None if known is None else known.roles
        self.is_public = self._roles == EVERYONE
        """Calls that strangers may make are neither logged nor measured: they could fill the log."""
        self.is_admin = known is not None and known.recorded is not None
        self.policy, self._open, self._parser = policy, open_calls, parser
        self.audited = AuditedMethod(self.name, policy.audit, None if known is None else known.recorded)
        self._at_once = RequestLimit().at_once if known is None else known.limit.at_once

    async def enter(self, context: Context) -> OpenCall:
        """Set the caller, and check it before its request is received."""
        peer = context.peer()
        if self.policy.limits.is_new(peer) and self.policy.metrics is not None:
            self.policy.metrics.connections_used.labels(self.policy.setting).inc()
        identity.address.set(_browser_of(context) if self.policy.names_addresses else identity.address_of(peer))
        tokens = self.policy.tokens
        who = identity.of_connection(context.auth_context()) if tokens is None else await _token_holder(tokens, context)
        caller.set(who)
        who.check_time()
        self._check_revocation(who)
        require_role(who, self._roles, trusts_everybody=self.policy.trusts_everybody)
        if who is not ANYBODY and not self.is_public and self.policy.clients is not None:
            self.policy.clients.refuse_holder(who)
        return self.policy.limits.open(peer if who is ANYBODY else str(who), self.method, self._at_once)

    def _check_revocation(self, who: Identity) -> None:
        if self.policy.revocations is not None and (why := self.policy.revocations.denied(who)):
            if self.policy.metrics is not None:
                self.policy.metrics.revoked_calls.labels(self.policy.setting).inc()
            raise errors.Revoked(str(who), why)

    def while_valid(self) -> AbstractContextManager[None]:
        """The block of a call that may be open for long: it ends with the caller's certificate."""
        return self._open.while_valid(caller.get())

    async def read(self, open_call: OpenCall, context: Context) -> Any:
        """The call's one request. Raises InvalidInput, NotNow."""
        stall_s = self.policy.stall_s
        try:
            async with asyncio.timeout(stall_s):
                raw = await context.read()
        except TimeoutError:
            raise errors.NotNow(f"no request came within {stall_s:g} s", _RETRY_S, routine=True) from None
        if raw is grpc.aio.EOF:
            raise BadRequest("malformed", f"a request of {self.name}", "none")
        with open_call.refusals_block():
            return self.parsed(raw)

    def parsed(self, raw: bytes) -> Any:
        """A request from its bytes. Raises InvalidInput."""
        return parse(self.method, raw, self._parser)

    @asynccontextmanager
    async def answered(self, context: Context) -> AsyncIterator[None]:
        """Count the call by its code and time, and end it with the status of any error."""
        code, started = grpc.StatusCode.OK, time.monotonic()
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            # Its caller hung up, its deadline passed, or the server stops: grpc cancels the handler. GeneratorExit is
            # raised where a response was waiting for its reader.
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - every error becomes a status, and is logged
            code = code_of(error)
            self.audited.refused(error)
            if isinstance(error, BadRequest | errors.TooMany) and self.policy.metrics is not None:
                limit = error.why if isinstance(error, BadRequest) else "calls"
                self.policy.metrics.requests_refused.labels(self.policy.setting, limit).inc()
            await self._abort(context, error)
        finally:
            if not self.is_public and self.policy.metrics is not None:
                self.policy.metrics.rpc_seconds.labels(self.name, code.name).observe(time.monotonic() - started)

    def log_failure(self, work: asyncio.Future[Any]) -> None:
        """Log the error of work whose caller has hung up, and so gets no status."""
        if not work.cancelled() and isinstance(error := work.exception(), Exception):
            self._log(error)

    def _log(self, error: Exception) -> None:
        """Log the error of a call: a fault with its traceback, a refusal on one line."""
        code, peer = code_of(error), identity.address.get()
        if code is grpc.StatusCode.INTERNAL and not isinstance(error, errors.Relayed):
            log.error("rpc_failed", rpc=self.name, peer=peer, error=repr(error), exc_info=error)
        elif not self.is_public and not (isinstance(error, errors.ServerError) and error.routine):
            who = str(caller.get())
            log.info("rpc_refused", rpc=self.name, code=code.name, caller=who, peer=peer, error=str(error))

    async def _abort(self, context: Context, error: Exception) -> NoReturn:
        """Log an error, and end its call with its status."""
        if isinstance(error, StoreFull | StoreTakenOver):
            error = errors.NotNow(f"the coordinator cannot write: {error}", _LEDGER_RETRY_S)
        self._log(error)
        if not isinstance(error, errors.ServerError):
            await context.abort(code_of(error), f"the coordinator failed in {self.name}: see its log")
        await context.abort(error.code, str(error), status_metadata(error.code.value[0], str(error), error.detail))


async def _token_holder(tokens: Tokens, context: Context) -> Identity:
    """The caller of a port for tokens; ANYBODY without a token. Raises Unauthenticated, Forbidden, NotNow."""
    metadata: Iterable[tuple[str, Any]] = context.invocation_metadata() or ()
    given = [value for key, value in metadata if key == "authorization"]
    if not given:
        return ANYBODY
    if len(given) > 1 or not isinstance(given[0], str) or given[0][: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated("expected the metadata authorization: Bearer TOKEN, once, got another form")
    return await tokens.identity(given[0][len(_SCHEME) :].strip())


def _browser_of(context: Context) -> str:
    """host:port of the browser that the web process calls for; empty if it names none."""
    metadata: Iterable[tuple[str, Any]] = context.invocation_metadata() or ()
    return str(next((value for key, value in metadata if key == BROWSER_ADDRESS), ""))[:_MOST_ADDRESS]


def _wrap_stream_unary(call: _Call, inner: Handler) -> Handler:
    async def wrapped(requests: Any, context: Context) -> Any:
        async with call.answered(context):
            with await call.enter(context) as open_call, open_call.refusals_block(), call.while_valid():
                return await inner(requests, context)

    return wrapped


def _wrap_unary_unary(call: _Call, inner: Handler) -> Handler:
    """Once begun, the work is completed even if the caller hangs up: a change must not be half made."""

    async def wrapped(_: Any, context: Context) -> Any:
        async with call.answered(context):
            open_call = await call.enter(context)
            try:
                work = asyncio.ensure_future(inner(await call.read(open_call, context), context))
            except BaseException:  # a cancelled call too must be closed
                open_call.close()
                raise
            work.add_done_callback(lambda _: open_call.close())
            try:
                return await asyncio.shield(work)  # noqa: TID251 - its error is logged as that of the call
            except asyncio.CancelledError:
                work.add_done_callback(call.log_failure)
                raise

    return wrapped


def _wrap_responses(call: _Call, inner: Handler, *, one_request: bool) -> Handler:
    async def wrapped(requests: Any, context: Context) -> AsyncIterator[Any]:
        async with call.answered(context):
            with await call.enter(context) as open_call, call.while_valid():
                given = await call.read(open_call, context) if one_request else requests
                async for response in inner(given, context):
                    yield response

    return wrapped


_WRAPPERS: dict[tuple[bool, bool], tuple[str, Callable[[_Call, Handler], Handler]]] = {
    (False, False): ("unary_unary", _wrap_unary_unary),
    (True, False): ("stream_unary", _wrap_stream_unary),
    (False, True): ("unary_stream", partial(_wrap_responses, one_request=True)),
    (True, True): ("stream_stream", partial(_wrap_responses, one_request=False)),
}
"""The handler's attribute and its wrapper, by whether the requests and the responses are streams."""
