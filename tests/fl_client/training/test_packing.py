"""Packing of updates in encodings: their bytes, and client states of the values that the coordinator decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import algorithms as fl
from algorithms import tree
from algorithms.privacy.clipping import clipped, norm_of
from fl_client.errors import WorkFailed
from fl_client.training.payloads import check_size, encoding_of, exchange_of, pack_update
from fl_client.training.results import TrainingResult
from fl_client.training.trainer import Trainer
from protos.codec import Layout, digest_message, digest_of, unpack
from protos.encodings import EncodedLayout, EncodingSpec, decode, encoding_key
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tests.fl_client.devices import METHODS, assignment, bundles, local_task, start

INT8 = EncodingSpec("int8")


def wanted(name: str, **changes: Any) -> training_pb2.Assignment:
    """An assignment of a method with int8 updates."""
    made = assignment(METHODS[name])
    made.MergeFrom(training_pb2.Assignment(**{"upload_encodings": [tensor_pb2.ENCODING_INT8], **changes}))
    return made


def trained(name: str, work: training_pb2.Assignment) -> TrainingResult:
    """The result of a client without a state."""
    model = start()
    x = fl.read_state(model).trainable
    direction = METHODS[name].exchanges[0].direction(METHODS[name].init(x), {})
    return Trainer(local_task()).train(work, bundles(model, direction), None, lambda step, steps: None)


def decoded(result: TrainingResult) -> Mapping[str, fl.Tensors]:
    """The payloads of a scaffold-I or scaffold update, decoded with the keys that the coordinator derives."""
    found: dict[str, fl.Tensors] = {}
    names = {training_pb2.PAYLOAD_KIND_DELTA: "delta", training_pb2.PAYLOAD_KIND_VARIATE_CHANGE: "variate_change"}
    state = fl.read_state(start())
    for payload, piece in zip(result.update.header.payloads, result.update.pieces, strict=True):
        name = names[payload.kind]
        tensors = {**state.trainable, **state.buffers} if name == "delta" else state.trainable
        encoded = EncodedLayout.of(Layout.of(tensors, state.trainable), INT8)
        assert encoded.difference_from(payload.manifest, 1 << 20) is None
        found[name] = decode(piece, encoded, encoding_key(11, "update", 0, name))
    return found


@pytest.mark.parametrize("name", ["scaffold", "scaffold-I"])
def test_every_payload_is_encoded(name: str) -> None:
    """With the keys of seed, exchange and payload; digest and size are those of the encoded bytes."""
    update, plain = trained(name, wanted(name)).update, trained(name, assignment(METHODS[name])).update
    assert update.header.digest == digest_message(digest_of(*update.pieces))
    assert update.header.size_bytes == sum(map(len, update.pieces)) < plain.header.size_bytes
    assert [payload.manifest.encoding for payload in update.header.payloads] == (
        [tensor_pb2.ENCODING_INT8] * len(METHODS[name].exchanges[0].payloads)
    )
    delta = decoded(trained(name, wanted(name)))["delta"]
    state = fl.read_state(start())
    assert delta.keys() == {**state.trainable, **state.buffers}.keys()


@pytest.mark.parametrize("name", ["scaffold", "scaffold-I", "feddyn"])
def test_the_next_state_is_that_of_the_decoded_payloads(name: str) -> None:
    """Not of the computed ones: the server's state is the sum of what it decodes."""
    result, plain = trained(name, wanted(name)), trained(name, assignment(METHODS[name]))
    algorithm, x = METHODS[name], fl.read_state(start()).trainable
    values = {payload: {name: tensors[name] for name in x} for payload, tensors in decoded(result).items()}
    direction = algorithm.exchanges[0].direction(algorithm.init(x), {})
    context = fl.ClientContext(direction, algorithm.client_init(x), 1.0)
    update = fl.ClientUpdate(values, {}, result.update.header.num_steps, 0.1)
    [(symbol, expected)] = algorithm.next_client_state(context, update).items()
    assert result.next_state is not None
    assert plain.next_state is not None
    torch.testing.assert_close(dict(result.next_state.at(1.0)[symbol]), dict(expected), rtol=0, atol=0)
    other = tree.subtract(plain.next_state.at(1.0)[symbol], expected)
    assert float(tree.norm(other)) > 0


def test_a_repeat_has_the_same_bytes() -> None:
    """Another attempt has them too; another seed has others."""
    first = trained("fedavg", wanted("fedavg")).update
    assert trained("fedavg", wanted("fedavg", attempt=3)).update.pieces == first.pieces


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"upload_encodings": [99]}, "upload_encodings: expected an encoding of plain .* got number 99"),
        ({"upload_encodings": [tensor_pb2.ENCODING_TOP_K]}, "expected a fraction over 0 .* for topk, got 0.0"),
        ({"upload_encodings": [tensor_pb2.ENCODING_INT8], "upload_fraction": 0.5}, "expected no fraction for int8"),
    ],
    ids=["unknown", "no-fraction", "fraction"],
)
def test_an_encoding_that_this_device_cannot_write_is_refused(changes: dict[str, Any], words: str) -> None:
    """Before any work, with the reason UNSUPPORTED."""
    work = assignment(METHODS["fedavg"])
    work.MergeFrom(training_pb2.Assignment(**changes))
    with pytest.raises(WorkFailed, match=words) as failed:
        exchange_of(work, METHODS["fedavg"])
    assert failed.value.reason == pb.FAILURE_REASON_UNSUPPORTED


def test_the_first_known_encoding_is_used() -> None:
    """A newer coordinator may name others before it. Without any it is plain."""
    work: Any = assignment(METHODS["fedavg"])
    assert encoding_of(work) == EncodingSpec("plain")
    work.upload_encodings.extend([99, tensor_pb2.ENCODING_INT4, tensor_pb2.ENCODING_PLAIN])
    assert encoding_of(work) == EncodingSpec("int4")


def test_the_limit_of_an_update_applies_to_its_encoded_size() -> None:
    """A plain update of the same model would be over the limit."""
    state = fl.read_state(start())
    layout = Layout.of({**state.trainable, **state.buffers}, state.trainable)
    size = EncodedLayout.of(layout, INT8).size_bytes
    exchange = METHODS["fedavg"].exchanges[0]
    check_size(wanted("fedavg", max_update_bytes=size), exchange, layout)
    with pytest.raises(WorkFailed, match=f"at most {size - 1} bytes, this model needs {size}"):
        check_size(wanted("fedavg", max_update_bytes=size - 1), exchange, layout)


def test_a_value_that_the_encoding_cannot_have_is_not_finite() -> None:
    """The largest float32 rounds to an infinity of bf16."""
    state = fl.read_state(start())
    huge = {name: torch.full_like(tensor, torch.finfo(torch.float32).max) for name, tensor in state.trainable.items()}
    update = fl.ClientUpdate({"delta": huge}, {}, 1, 0.1)
    with pytest.raises(WorkFailed, match="delta: tensor .* finite") as failed:
        pack_update(wanted("fedavg", upload_encodings=[tensor_pb2.ENCODING_BF16]), update, 1, 0.0)
    assert failed.value.reason == pb.FAILURE_REASON_NOT_FINITE


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_what_a_client_learnt_is_clipped_and_not_the_direction(clip: float) -> None:
    """FedCM: what is sent is delta + eta K (1 - alpha) Delta, of the norm C at most; buffers stay as they are."""
    work, model = assignment(METHODS["fedcm"]), start()
    x, rate = fl.read_state(model).trainable, work.training.learning_rate
    direction = {name: torch.full_like(tensor, 0.5) for name, tensor in x.items()}

    def sent(clip: float) -> fl.Tensors:
        """The trainable values of the update."""
        work.clip, work.without_direction = clip, bool(clip)
        update = Trainer(local_task()).train(work, bundles(model, direction), None, lambda step, steps: None).update
        layout = Layout.from_manifest(update.header.payloads[0].manifest, 1 << 20)
        values = unpack(b"".join(update.pieces), layout)
        steps.append(update.header.num_steps)
        return {name: values[name] for name in x}

    steps = list[int]()
    delta, learnt = sent(0.0), sent(clip)
    known = rate * (1 - 0.1) * steps[0]
    whole = {name: delta[name] + known * 0.5 for name in x}
    torch.testing.assert_close(learnt, clipped(whole, clip), rtol=1e-4, atol=1e-6)
    assert norm_of(learnt) <= clip * 1.0001
