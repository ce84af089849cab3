"""Updates as whole numbers, for secure aggregation: the numbers that are masked, and the values that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from algorithms import tree
from algorithms.base import ClientUpdate, Tensors
from algorithms.quantization import Numbers, Quantizer
from fl_client.errors import unsupported
from fl_client.storage.pending_updates import Update, work_digest
from fl_common.privacy.secret_stream import SecretStream
from fl_common.secure_aggregation.rounding import Rounding, rounding_key
from fl_common.secure_aggregation.scalars import count_of
from fl_common.secure_aggregation.terms import Terms, value_bits_for
from protos.fl.v1 import tensor_pb2, training_pb2


def rounded_update(
    assignment: training_pb2.Assignment, computed: ClientUpdate, examples: int, *, keeps: bool
) -> tuple[Update, ClientUpdate]:
    """The update's header without its digest, with its numbers as int32; and the update as it is summed.

    The header stays on the device as it is: what is sent tells neither examples nor steps nor the loss.

    Args:
        assignment: with the terms.
        computed: the update.
        examples: n_i.
        keeps: whether a client state is made of the update as it is summed. Else it is `computed`, which takes no time.

    Raises:
        WorkFailed: terms that do not fit the update.
    """
    try:
        terms = Terms.from_bytes(assignment.secure_aggregation.terms)
        rounding = Rounding.from_text(terms.quantizer)
        wanted, came = list(dict.fromkeys(it.payload for it in rounding.payloads)), list(computed.payloads)
        if sorted(wanted) != sorted(came):
            raise ValueError(f"expected terms with the payloads {', '.join(came)}, got {', '.join(wanted)}")
        pieces, counted = [], dict[str, Tensors]()
        for payload, numbers, values in _rounded(rounding, assignment, computed, examples):
            pieces.append(numbers)
            if keeps:
                counted[payload] = _beside(computed.payloads[payload], values())
        scalars = count_of(rounding.metrics)
        shape = sum(map(len, pieces)), value_bits_for(rounding.bits, len(terms.cohort)), scalars
        if (has := (terms.values, terms.value_bits, terms.scalars)) != shape:
            raise ValueError(f"expected terms with values, bits and scalars of {shape} for this model, got {has}")
    except ValueError as error:
        raise unsupported(f"secure aggregation: {error}") from error
    manifest = tensor_pb2.Manifest(size_bytes=terms.size_bytes, encoding=tensor_pb2.ENCODING_PLAIN)
    header = training_pb2.UpdateHeader(
        key=assignment.key,
        attempt=assignment.attempt,
        payloads=[training_pb2.Payload(kind=training_pb2.PAYLOAD_KIND_MASKED, manifest=manifest)],
        size_bytes=terms.size_bytes,
        num_examples=examples,
        num_steps=computed.steps,
        training_loss=None if assignment.training.HasField("privacy") else computed.loss,
        state_epoch=assignment.state_epoch,
    )
    update = Update(work_digest(assignment), header, tuple(numbers.data.cast("B") for numbers in pieces))
    return update, replace(computed, payloads={name: counted[name] for name in came}) if keeps else computed


def wanted_metrics(assignment: training_pb2.Assignment) -> tuple[str, ...]:
    """The metrics of the received model whose sums are masked; empty if none are wanted. Raises WorkFailed."""
    if not assignment.HasField("secure_aggregation"):
        return ()
    try:
        return Rounding.from_text(Terms.from_bytes(assignment.secure_aggregation.terms).quantizer).metrics
    except ValueError as error:
        raise unsupported(f"secure aggregation: {error}") from error


def as_summed(assignment: training_pb2.Assignment, computed: ClientUpdate, examples: int) -> ClientUpdate:
    """The update with the values that its numbers would stand for, in a simulation, where nothing is masked."""
    if not assignment.rounding:
        return computed
    rounding = Rounding.from_text(assignment.rounding)
    made = _rounded(rounding, assignment, computed, examples)
    counted = {payload: _beside(computed.payloads[payload], values()) for payload, _, values in made}
    return replace(computed, payloads={**computed.payloads, **counted})


def _rounded(
    rounding: Rounding, assignment: training_pb2.Assignment, computed: ClientUpdate, examples: int
) -> Iterator[tuple[str, Numbers, Callable[[], Tensors]]]:
    """For each payload of the rounding: its name, its numbers, and what makes the values that they stand for of them.

    Raises ValueError.
    """
    seed, exchange = assignment.training.seed, assignment.key.exchange
    for number, rule in enumerate(rounding.payloads):
        payload = computed.payloads[rule.payload]
        quantizer = Quantizer.like(payload, rule.clip, rounding.bits)
        weight = rounding.weight(number, examples, computed.steps)
        rotation = SecretStream(rounding.rotation_key(number))
        own = SecretStream(rounding_key(seed, exchange, number))
        numbers = quantizer.quantize(payload, weight, rotation, own)
        yield rule.payload, numbers, partial(quantizer.mean, numbers, weight, rotation)


def _beside(payload: Tensors, values: Tensors) -> Tensors:
    """Values on the devices of the payload that they were made of."""
    return tree.map(lambda at, made: made.to(at.device), payload, values)
