"""Errors as statuses of a call: the code of each, its text and its detail."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from fl_server import errors, identity
from fl_server.identity import caller
from fl_server.store.errors import StoreFull, StoreTakenOver
from protos.status import status_metadata

log = structlog.get_logger()

CODES: dict[type[Exception], grpc.StatusCode] = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownSessionError: grpc.StatusCode.UNAUTHENTICATED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.CertificateEnded: grpc.StatusCode.UNAUTHENTICATED,
    errors.Fenced: grpc.StatusCode.ABORTED,
    errors.Contested: grpc.StatusCode.ABORTED,
    errors.NoCommonProtocol: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.NoSuchResource: grpc.StatusCode.NOT_FOUND,
    errors.NoSuchRun: grpc.StatusCode.NOT_FOUND,
    errors.NoSuchModel: grpc.StatusCode.NOT_FOUND,
    errors.NoBestRound: grpc.StatusCode.NOT_FOUND,
    errors.TooFewUpdates: grpc.StatusCode.PERMISSION_DENIED,
    errors.RunExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.NoSuchService: grpc.StatusCode.NOT_FOUND,
    errors.NoSuchClient: grpc.StatusCode.NOT_FOUND,
    errors.NoSuchRelease: grpc.StatusCode.NOT_FOUND,
    errors.WrongRelease: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NoSuchToken: grpc.StatusCode.NOT_FOUND,
    errors.NotConfigured: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RunBroke: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UploadBroken: grpc.StatusCode.DATA_LOSS,
    errors.NotNow: grpc.StatusCode.UNAVAILABLE,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooMany: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Relayed: grpc.StatusCode.UNKNOWN,
}
"""Status code of each error. Any other exception is INTERNAL, and only the log has its cause."""

RETRY_S = 5.0
"""Wait after a call that could not be written to the ledger."""


def code_of(error: Exception) -> grpc.StatusCode:
    """The status code of an error."""
    if isinstance(error, StoreFull | StoreTakenOver):
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, errors.Relayed):
        return next((code for code in grpc.StatusCode if code.value[0] == error.code), CODES[errors.Relayed])
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def log_error(name: str, error: Exception, *, logged: bool) -> None:
    """Log the error of a call: a fault with its traceback, a refusal on one line.

    logged: False for methods that anyone may call without a certificate: a stranger could fill the log with refusals.
    """
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, errors.Relayed):
        log.error("rpc_failed", rpc=name, peer=identity.address.get(), error=repr(error), exc_info=error)
    elif logged and not (isinstance(error, errors.ServerError) and error.routine):
        log.info(
            "rpc_refused", rpc=name, code=code.name, caller=str(caller.get()), peer=identity.address.get(),
            error=str(error),
        )  # fmt: skip


async def abort(context: grpc.aio.ServicerContext[Any, Any], name: str, error: Exception, *, logged: bool) -> NoReturn:
    """Log an error, and end its call with its status. logged: see `log_error`."""
    if isinstance(error, StoreFull | StoreTakenOver):
        error = errors.NotNow(f"the coordinator cannot write: {error}", RETRY_S)
    log_error(name, error, logged=logged)
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, errors.Relayed):
        await context.abort(code, f"the coordinator failed in {name}: see its log")
    detail = error.detail if isinstance(error, errors.ServerError) else None
    await context.abort(code, str(error), status_metadata(code.value[0], str(error), detail))
