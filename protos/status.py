"""Details of failed calls, as every gRPC language carries them: google.rpc.Status in the trailing metadata.

Knows the format and not the transport, so that both ends and their tests can use it without grpc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from protos.fl.v1 import errors_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Metadata key that grpc reserves for a serialized google.rpc.Status."""


def status_metadata(code: int, message: str, detail: Message | None) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata of a failed call.

    Args:
        code: number of the grpc status code that the call ends with; readers refuse another one.
        message: text of the status, the same that the call ends with.
        detail: a message of errors.proto, or None where the code says it all.
    """
    status = Status(code=code, message=message)
    if detail is not None:
        status.details.add().Pack(detail)
    return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


def detail_of(trailing_metadata: Iterable[tuple[str, str | bytes]] | None) -> Message | None:
    """The first message of errors.proto in a call's trailing metadata.

    None where there is none: no metadata, another server's details, a newer server's message, bytes that are no Status.
    """
    for key, value in trailing_metadata or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            return _first_detail(value)
    return None


def _first_detail(serialized: bytes) -> Message | None:
    try:
        status = Status.FromString(serialized)
        for packed in status.details:
            if (detail := _empty(packed.TypeName())) is not None and packed.Unpack(detail):
                return detail
    except DecodeError:
        return None
    return None


def _empty(full_name: str) -> Message | None:
    """A new message of errors.proto by its full name; protobuf's own look-ups stop at a NUL in it."""
    kind = _DETAILS.get(full_name)
    return None if kind is None else kind()


_DETAILS: Mapping[str, type[Message]] = {
    descriptor.full_name: getattr(errors_pb2, name)
    for name, descriptor in errors_pb2.DESCRIPTOR.message_types_by_name.items()
}
