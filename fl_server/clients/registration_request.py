"""A registration request: its checks, and the client record that is made from it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fl_common.names import ID_PATTERN, check_id
from fl_server.errors import InvalidInput, NoCommonProtocol
from fl_server.store.records import ClientRecord
from protos.digests import digest_bytes, digest_text
from protos.encodings import ENCODINGS
from protos.fl.v1 import coordinator_pb2 as pb
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

MAX_ENTRIES = {
    "labels": 64,
    "tasks": 64,
    "methods": 64,
    "encodings": 64,
    "pending": 1000,
    "states": 1000,
    "held": 64,
    "packages": 64,
}
MAX_MODELS = 64
"""Released models of one device."""
MAX_CHARS = 256
"""Longest label, task name, device name and other text in a request."""
_END_OF_TIME = 253_402_300_800 - 86_400
"""A day before the end of the year 9999, so that the time can be shown in any zone."""


def checked_id(client_id: str) -> str:
    """A valid client id. Raises InvalidInput."""
    try:
        return check_id("client_id", client_id)
    except ValueError as error:
        raise InvalidInput("client_id", "1 to 64 of A-Z a-z 0-9 . _ -", client_id) from error


def check_sizes(request: pb.RegisterRequest) -> None:
    """Raises InvalidInput for a request that is too large: ledger and memory keep what it has."""
    for field, most in MAX_ENTRIES.items():
        if (count := len(getattr(request, field))) > most:
            raise InvalidInput(field, f"{most} at most", f"{count}")
    for field, text in _texts(request):
        if len(text) > MAX_CHARS:
            raise InvalidInput(field, f"{MAX_CHARS} characters at most", f"{len(text)}")
    for offer in request.tasks:
        _check_frozen(offer)
        if len(offer.labels) > MAX_ENTRIES["labels"]:
            raise InvalidInput("tasks.labels", f"{MAX_ENTRIES['labels']} at most", f"{len(offer.labels)}")
        if offer.train_batches > offer.train_examples:
            raise InvalidInput(
                "tasks.train_batches",
                f"{offer.train_examples} batches at most, as the task {offer.name!r} has so many examples to train on",
                f"{offer.train_batches}",
            )
    titles = [(offer.name, offer.data) for offer in request.tasks]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise InvalidInput("tasks", "each task and data once", f"task {twice[0]!r} with data {twice[1]!r} twice")
    check_availability(request.availability)


def held_resources(request: pb.RegisterRequest) -> list[bytes]:
    """Digests of the resources that the client holds. Raises InvalidInput for one that is no digest."""
    try:
        return [digest_bytes(digest) for digest in request.held]
    except ValueError as error:
        raise InvalidInput("held", "digests", str(error)) from error


def held_releases(request: pb.RegisterRequest) -> dict[str, int]:
    """The versions of released models on the client's device. Raises InvalidInput."""
    held = {release.model: release.version for release in request.releases.held}
    if len(request.releases.held) > MAX_MODELS or not all(map(ID_PATTERN.fullmatch, held)):
        came = f"{len(request.releases.held)} with the names {', '.join(sorted(held)[:5])}"
        raise InvalidInput("releases.held", f"at most {MAX_MODELS} models with names of A-Z a-z 0-9 . _ -", came)
    return held


def _check_frozen(offer: pb.TaskOffer) -> None:
    """Raises InvalidInput for frozen parameters without a digest."""
    if not offer.HasField("frozen"):
        return
    try:
        digest_bytes(offer.frozen.digest)
    except ValueError as error:
        raise InvalidInput("tasks", "frozen parameters with a digest", error) from error


def check_availability(availability: pb.Availability) -> None:
    """Raises InvalidInput for a detail that is too long, or a time after the year 9999."""
    if len(availability.detail) > MAX_CHARS:
        raise InvalidInput("availability", f"{MAX_CHARS} characters at most", f"{len(availability.detail)}")
    if not 0 <= availability.until.seconds < _END_OF_TIME:
        raise InvalidInput("availability.until", "a time up to the year 9999", f"{availability.until.seconds}")


def _texts(request: pb.RegisterRequest) -> Iterator[tuple[str, str]]:
    yield from (("packages", name) for name in request.packages)
    yield from (("instance_id", request.instance_id), ("software", request.software))
    yield from (("device", request.device.kind), ("device", request.device.name))
    for name, value in request.labels.items():
        yield from (("labels", name), ("labels", value))
    for offer in request.tasks:
        yield from (("tasks.data", offer.data), ("tasks.package", offer.package))
        for text in (*offer.labels.keys(), *offer.labels.values()):
            yield "tasks.labels", text
    for field in ("tasks", "methods"):
        for offer in getattr(request, field):
            for text in (offer.name, offer.fingerprint.version, offer.fingerprint.source):
                yield field, text


def unregistered(client_id: str) -> ClientRecord:
    """The record of a client that an operator names before it registers. Raises InvalidInput."""
    now = time.time()
    return ClientRecord(checked_id(client_id), registered_at=now, last_seen=now)


def common_protocol(client: pb.ProtocolRange) -> int:
    """The highest version that both sides support. Raises NoCommonProtocol."""
    highest = min(client.max, PROTOCOL_MAX)
    if highest < max(client.min, PROTOCOL_MIN) or client.min > client.max:
        raise NoCommonProtocol((client.min, client.max), (PROTOCOL_MIN, PROTOCOL_MAX))
    return highest


def record_of(
    request: pb.RegisterRequest, known: ClientRecord | None, enrolled: Mapping[str, str] | None, *, claims: bool = True
) -> ClientRecord:
    """The client's record after this registration. What operators set before stays.

    enrolled: labels of the caller's enrollment, which win over those that it claims; None: it has none. claims: whether
    claimed labels count.
    """
    now = time.time()
    base = known or ClientRecord(request.client_id, registered_at=now, last_seen=now)
    encodings = " ".join(name for name, number in ENCODINGS.items() if number in request.encodings and name != "plain")
    return replace(
        base,
        last_seen=now,
        instance_id=request.instance_id,
        software=request.software,
        labels={**(request.labels if claims else {}), **(enrolled or {})},
        enrolled=None if enrolled is None else dict(enrolled),
        device={
            "kind": request.device.kind, "name": request.device.name, "memory_bytes": request.device.memory_bytes,
        },
        tasks=[_offer(offer, encodings, _labels_of(offer, enrolled or {}, claims=claims)) for offer in request.tasks],
        methods=[
            {"name": offer.name, "version": offer.fingerprint.version, "source": offer.fingerprint.source}
            for offer in request.methods
        ],
        releases=request.HasField("releases"),
    )  # fmt: skip


def _offer(offer: pb.TaskOffer, encodings: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """An offer as the ledger has it.

    "frozen" is the digest of the client's own frozen parameters, if it has some; "encodings" has the names of those
    that the client knows besides plain, with spaces between; "data" and "labels" are those of one of several offers.
    """
    frozen = {"frozen": digest_text(digest_bytes(offer.frozen.digest))} if offer.HasField("frozen") else {}
    return {
        "name": offer.name, "version": offer.fingerprint.version, "source": offer.fingerprint.source,
        "train_examples": offer.train_examples, "eval_examples": offer.eval_examples,
        **({"train_batches": offer.train_batches} if offer.train_batches else {}),
        **frozen,
        **({"encodings": encodings} if encodings else {}),
        **({"data": offer.data} if offer.data else {}),
        **({"package": offer.package} if offer.package else {}),
        **({"labels": dict(labels)} if labels else {}),
    }  # fmt: skip


def _labels_of(offer: pb.TaskOffer, enrolled: Mapping[str, str], *, claims: bool) -> dict[str, str]:
    """An offer's own labels that count: they are claimed, and those of the enrollment win."""
    return {name: value for name, value in offer.labels.items() if claims and name not in enrolled}
