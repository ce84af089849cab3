"""Records calls in the audit log.

A call of the Admin service that changes something has two rows: "asked", durable before it begins, and its result. So
no change is in effect without a row, also after SIGKILL or a power cut. A call that cannot be recorded is not carried
out. Calls of clients are recorded only if they are refused for their identity.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fl_server import identity
from fl_server.audit.log import AuditLog
from fl_server.audit.writer import AuditRecord
from fl_server.errors import CertificateEnded, Forbidden, Unauthenticated
from fl_server.identity import ANYBODY, caller
from fl_server.statuses import code_of

_IDENTITY = (Forbidden, CertificateEnded, Unauthenticated)
"""Errors that are recorded for every service."""
Handler = Callable[[Any, Any], Any]

_begun: ContextVar[bool] = ContextVar("begun", default=False)
"""Whether the current call has a request that was carried out: then its end is recorded with its work."""


def _nothing(_: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the rows of a method have. Only named fields are kept, so that no secret of a request gets into a row."""

    changes: bool = True
    """Whether the call changes something or gives a model away: then a row is durable before it begins."""
    subject: Callable[[Any], str] = _nothing
    """Reads the subject from the request."""
    details: tuple[str, ...] = ()
    """Fields of the request."""
    made: Callable[[Any], str] = _nothing
    """Reads the subject of a call that makes something from the response."""

    def detail(self, request: Any) -> str:
        """The named fields that are set: "reason=lost device". A stream of requests has none."""
        if not self.details:
            return ""
        given = {field.name: value for field, value in request.ListFields() if field.name in self.details}
        return ", ".join(f"{name}={given[name]}" for name in self.details if name in given)


def record_of(method: str, subject: str, result: str, detail: str = "") -> AuditRecord:
    """A record of the current call."""
    who = caller.get()
    return AuditRecord(
        "anybody" if who is ANYBODY else str(who), identity.address.get(), method, subject, result, detail
    )


class AuditedMethod:
    """One method of a port, for the interceptor."""

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
            call = _Call(auditor, self._name, recorded, request)
            return call.stream(inner(request, context)) if streams else call.answer(inner, context)

        return begin

    def refused(self, error: Exception) -> None:
        """The call ended with this error: record it unless its work did."""
        if self._auditor is None or _begun.get() or (self._recorded is None and not isinstance(error, _IDENTITY)):
            return
        self._auditor.record_refusal(record_of(self._name, "", code_of(error).name.lower(), str(error)))


class _Call:
    """One call of the Admin service."""

    def __init__(self, auditor: AuditLog, name: str, what: Recorded, request: Any) -> None:
        self._auditor, self._name, self._what, self._request = auditor, name, what, request
        self._subject, self._detail = what.subject(request), what.detail(request)

    async def answer(self, inner: Handler, context: Any) -> Any:
        """The response. Raises StoreError if a change cannot be recorded: then nothing was done."""
        await self._ask()
        try:
            response = await inner(self._request, context)
        except Exception as error:
            await self._ended(code_of(error).name.lower(), str(error))
            raise
        except asyncio.CancelledError:
            self._ended_later("cancelled")
            raise
        self._subject = self._what.made(response) or self._subject
        await self._ended("ok")
        return response

    async def stream(self, responses: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The responses. Raises StoreError if the call cannot be recorded: then nothing was sent."""
        await self._ask(begins=True)
        result, why = "cancelled", ""
        try:
            async with aclosing(responses) as messages:  # type: ignore[type-var]  # a handler is an async generator
                async for message in messages:
                    yield message
            result = "ok"
        except Exception as error:
            result, why = code_of(error).name.lower(), str(error)
            raise
        finally:
            self._ended_later(result, why)

    async def _ask(self, *, begins: bool = False) -> None:
        if self._what.changes:
            number = await self._auditor.record_now(self._record("asked"))
            self._detail = ", ".join(filter(None, (f"asked in row {number}", self._detail)))
        elif begins:
            self._auditor.record_read(self._record("begun"))

    async def _ended(self, result: str, why: str = "") -> None:
        if not self._what.changes:
            self._auditor.record_read(self._record(result, why))
            return
        await self._auditor.record_in_time(self._record(result, why))

    def _ended_later(self, result: str, why: str = "") -> None:
        """Record the end without waiting: the call is being cancelled, or its caller has all that it wanted."""
        record = self._record(result, why)
        (self._auditor.record_later if self._what.changes else self._auditor.record_read)(record)

    def _record(self, result: str, why: str = "") -> AuditRecord:
        return record_of(self._name, self._subject, result, "; ".join(filter(None, (self._detail, why))))
