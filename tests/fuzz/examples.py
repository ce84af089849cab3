"""A valid message of every type of the contract, made from its descriptor, so that new methods are fuzzed too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from fl_client.enrollment.folder import new_request
from fl_tasks import fingerprint
from protos.chunks import encode_chunk
from protos.codec import Layout, digest_message, pack
from protos.fl.v1 import admin_pb2, coordinator_pb2, tensor_pb2, training_pb2
from protos.wire import payload_kind
from tests.processes.federation import run_spec
from tests.processes.raw_client import Update, messages
from tests.processes.tiny_task import Tiny, plain

RUN, CLIENT, TASK = "fuzzed-00000", "edge-1", "tests.processes.tiny_task:Tiny"
_NUMBERS = {"min": 1, "max": 1, "protocol": 1, "round": 0, "exchange": 0, "page_size": 3, "num_examples": 10}
_TEXTS = {
    "run_id": RUN, "client_id": CLIENT, "instance_id": "instance-1", "session_id": "s1", "task": TASK,
    "service": "live", "file_containing_symbol": "fl.v1.Coordinator", "subject": RUN, "page_token": "",
}  # fmt: skip
_DEEPEST = 6


def bundle() -> tuple[Layout, bytes]:
    """Layout and bytes of the tiny task's model with zeros."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in plain().state_dict().items()}
    layout = Layout.of(tensors, tensors.keys())
    return layout, bytes(pack(tensors, layout))


LAYOUT, DATA = bundle()
CSR = new_request().csr
"""A request for a certificate; its key is another one in each process."""


def resource() -> tensor_pb2.Resource:
    """The model as a resource."""
    return tensor_pb2.Resource(
        kind=tensor_pb2.RESOURCE_KIND_MODEL,
        digest=digest_message(LAYOUT.digest(DATA)),
        size_bytes=len(DATA),
        encoding=tensor_pb2.ENCODING_PLAIN,
    )


def header() -> training_pb2.UpdateHeader:
    """The header of an update for the tiny task."""
    payload = training_pb2.Payload(kind=training_pb2.PAYLOAD_KIND_DELTA, manifest=LAYOUT.to_manifest())
    return training_pb2.UpdateHeader(
        session_id="s1", key=training_pb2.ExchangeKey(run_id=RUN), payloads=[payload], size_bytes=len(DATA),
        digest=digest_message(LAYOUT.digest(DATA)), num_examples=10, num_steps=1, training_loss=0.5,
    )  # fmt: skip


def upload_parts() -> list[Message | bytes]:
    """The messages of an upload, and chunks in the encoding that is read in place."""
    update = Update(header(), DATA, training_pb2.UpdateTrailer(size_bytes=len(DATA)))
    return [*messages(update, 64), encode_chunk(DATA, 0, 32), encode_chunk(DATA, 64, 64)]


def assignment() -> training_pb2.Assignment:
    """One epoch of FedCM, with every optional field."""
    made = training_pb2.Assignment(
        key=training_pb2.ExchangeKey(run_id=RUN),
        task=TASK,
        resources=[resource()],
        training=training_pb2.LocalTraining(
            algorithm=_algorithm(), learning_rate=0.1, local_epochs=1, batch_size=16, seed=7, population=4
        ),
        payloads=[payload_kind("delta")],
        upload_encodings=[tensor_pb2.ENCODING_PLAIN],
        max_update_bytes=1 << 20,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    made.deadline.FromSeconds(600)
    made.counted.CopyFrom(training_pb2.Outcome(key=made.key, digest=resource().digest, counted=True, clip_factor=1.0))
    return made


def _algorithm() -> training_pb2.AlgorithmSpec:
    made = training_pb2.AlgorithmSpec(name="fedcm")
    made.parameters.update({"alpha": 0.2})
    return made


def _offer() -> coordinator_pb2.TaskOffer:
    version, source = fingerprint(Tiny())
    code = training_pb2.TaskFingerprint(version=version, source=source)
    return coordinator_pb2.TaskOffer(name=TASK, fingerprint=code, train_examples=10, eval_examples=5)


def _spec() -> admin_pb2.RunSpec:
    made = run_spec("made-by-fuzzer", task={"name": TASK, "options": {"model": "plain"}}, labels={"site": "fuzz"})
    made.algorithm.schedules["alpha"].CopyFrom(training_pb2.ParameterSchedule(kind="linear", end=0.5))
    return made


_MADE: Mapping[str, Callable[[], Message]] = {
    "fl.v1.AlgorithmSpec": _algorithm,
    "fl.v1.RunSpec": _spec,
    "fl.v1.TaskOffer": _offer,
    "fl.v1.Digest": lambda: digest_message(LAYOUT.digest(DATA)),
    "fl.v1.Manifest": LAYOUT.to_manifest,
    "fl.v1.Resource": resource,
    "fl.v1.UpdateHeader": header,
    "fl.v1.Assignment": assignment,
}


def examples(descriptor: Any) -> list[Message]:
    """Valid messages of a type: one for each part of its first choice (oneof), or one."""
    if descriptor.full_name in _MADE:
        return [_MADE[descriptor.full_name]()]
    choices = [choice for choice in descriptor.oneofs if len(choice.fields) > 1]
    if not choices:
        return [_filled(descriptor, 0, None)]
    return [_filled(descriptor, 0, field.name) for field in choices[0].fields]


def _filled(descriptor: Any, depth: int, chosen: str | None) -> Message:
    message: Message = GetMessageClass(descriptor)()
    if descriptor.full_name in _MADE:
        message.CopyFrom(_MADE[descriptor.full_name]())
        return message
    for field in _settable(descriptor, chosen):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, field.name), field, depth)
        elif field.message_type is not None:
            if depth < _DEEPEST:
                inner = _filled(field.message_type, depth + 1, None)
                target = getattr(message, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).append(_value(field))
        else:
            setattr(message, field.name, _value(field))
    return message


def _settable(descriptor: Any, chosen: str | None) -> Iterator[Any]:
    """The fields, with one of each choice."""
    for field in descriptor.fields:
        choice = field.containing_oneof
        if (
            choice is None
            or len(choice.fields) == 1
            or field.name == (chosen if chosen in {each.name for each in choice.fields} else choice.fields[0].name)
        ):
            yield field


def _fill_map(values: Any, field: Any, depth: int) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    one = "loss" if key.type == key.TYPE_STRING else 1
    if value.message_type is None:
        values[one] = _value(value)
    elif depth < _DEEPEST:
        values[one].CopyFrom(_filled(value.message_type, depth + 1, None))


def _value(field: Any) -> Any:
    if field.name == "csr":
        return CSR
    if field.type == field.TYPE_STRING:
        return _TEXTS.get(field.name, "site")
    if field.type == field.TYPE_BYTES:
        return b"bytes"
    if field.type == field.TYPE_BOOL:
        return True
    if field.type in {field.TYPE_DOUBLE, field.TYPE_FLOAT}:
        return 0.5
    return _NUMBERS.get(field.name, 1)
