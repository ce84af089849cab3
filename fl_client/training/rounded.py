"""Updates as whole numbers, for secure aggregation: the header and the numbers that are masked."""

from __future__ import annotations

from algorithms.base import ClientUpdate
from algorithms.quantization import Quantizer
from fl_client.errors import WorkFailed
from fl_client.storage.pending_updates import Update, work_digest
from fl_common.privacy.secret_stream import SecretStream
from fl_common.secure_aggregation.rounding import Rounding, rounding_key
from fl_common.secure_aggregation.terms import Terms, value_bits_for
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2


def rounded_update(assignment: training_pb2.Assignment, computed: ClientUpdate, examples: int) -> Update:
    """The update's header without its digest, and its numbers as int32. Raises WorkFailed.

    examples: n_i.
    """
    try:
        terms = Terms.from_bytes(assignment.secure_aggregation.terms)
        rounding = Rounding.from_text(terms.quantizer)
        if list(computed.payloads) != ["delta"]:
            raise ValueError(f"expected a method that sends its delta alone, got {', '.join(computed.payloads)}")
        quantizer = Quantizer.like(computed.payloads["delta"], rounding.clip, rounding.bits)
        bits = value_bits_for(rounding.bits, len(terms.cohort))
        wanted, came = (quantizer.values, bits, 1), (terms.values, terms.value_bits, terms.scalars)
        if came != wanted:
            raise ValueError(f"expected terms of {wanted} values, bits and scalars for this model, got {came}")
        numbers = quantizer.quantize(
            computed.payloads["delta"],
            rounding.weight(examples),
            SecretStream(rounding.rotation_key),
            SecretStream(rounding_key(assignment.training.seed, assignment.key.exchange)),
        )
    except ValueError as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"secure aggregation: {error}") from error
    manifest = tensor_pb2.Manifest(size_bytes=terms.size_bytes, encoding=tensor_pb2.ENCODING_PLAIN)
    header = training_pb2.UpdateHeader(
        key=assignment.key,
        attempt=assignment.attempt,
        payloads=[training_pb2.Payload(kind=training_pb2.PAYLOAD_KIND_MASKED, manifest=manifest)],
        size_bytes=terms.size_bytes,
        num_examples=examples,
        num_steps=computed.steps,
        state_epoch=assignment.state_epoch,
    )
    return Update(work_digest(assignment), header, (numbers.tobytes(),))
