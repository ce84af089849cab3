"""Details of failed calls: google.rpc.Status in the trailing metadata, the format of all gRPC languages.

The package grpcio-status is not used: it needs grpc and a call object, raises for foreign or damaged details, and does
not unpack details. This module works on metadata alone and returns None for all that it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from protos.fl.v1 import errors_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""gRPC's metadata key for a serialized google.rpc.Status."""


def status_metadata(code: int, message: str, detail: Message | None) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata of a failed call.

    Args:
        code: number of the call's gRPC status code. Readers refuse a different one.
        message: the call's status text.
        detail: a message of errors.proto; None if the code is sufficient.
    """
    status = Status(code=code, message=message)
    if detail is not None:
        status.details.add().Pack(detail)
    return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


def detail_of(trailing_metadata: Iterable[tuple[str, str | bytes]] | None) -> Message | None:
    """The first message of errors.proto in a call's trailing metadata.

    None if there is none: no metadata, details of another or a newer server, or bytes that are no Status.
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
    """A new message of errors.proto by its full name. protobuf's own look-ups end at a NUL in the name."""
    kind = _DETAILS.get(full_name)
    return None if kind is None else kind()


_DETAILS: Mapping[str, type[Message]] = {
    descriptor.full_name: getattr(errors_pb2, name)
    for name, descriptor in errors_pb2.DESCRIPTOR.message_types_by_name.items()
}
