"""Admission of encoded updates: norms of the decoded values, and refusals of headers and bytes that lie."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_server.admission import norms
from fl_server.admission.client_rules import UpdateRefused, WrongDigest
from fl_server.admission.gate import AdmissionGate
from fl_server.admission.norms import digest_and_norms, digest_and_norms_of_encoded
from fl_server.aggregation.updates import Decoding, EncodedUpdate, UpdateKeys, UpdateShape
from protos.codec import Layout, digest_message, digest_of, pack
from protos.encodings import ENCODINGS, EncodedLayout, EncodingSpec, decode, encode
from protos.fl.v1 import training_pb2 as pb

TRAINED = ("w", "b")
TENSORS = {
    "w": torch.randn(300, 11, generator=torch.Generator().manual_seed(1)),
    "b": torch.full((3,), 0.5),
    "mean": torch.tensor([100.0, 2.0]),
    "n": torch.tensor(7),
}
LAYOUT = Layout.of(TENSORS, TRAINED)
TRAINABLE = Layout.of({name: TENSORS[name] for name in TRAINED}, TRAINED)
KEYS = UpdateKeys(5, 0)
INT8 = EncodingSpec("int8")
SPECS = [EncodingSpec(name, 0.1 if name in {"topk", "randk"} else 0.0) for name in ENCODINGS if name != "plain"]


def gate(spec: EncodingSpec = INT8, **changes: Any) -> AdmissionGate:
    """A gate for deltas in an encoding."""
    usual: dict[str, Any] = {
        "shape": UpdateShape.of(["delta"], LAYOUT, TRAINABLE).encoded_as(spec),
        "max_bytes": 1 << 20, "max_norm": 0.0, "clip_norm": 0.0, "state_epoch": 0,
        "decoding": lambda _: Decoding(KEYS),
    }  # fmt: skip
    return AdmissionGate(**{**usual, **changes})


def encoded(spec: EncodingSpec = INT8, **changes: torch.Tensor) -> bytearray:
    """The bytes of an update with these tensors."""
    return bytearray(encode({**TENSORS, **changes}, EncodedLayout.of(LAYOUT, spec), KEYS.of_payload("delta")))


def header(spec: EncodingSpec = INT8, size: int | None = None) -> pb.UpdateHeader:
    """The header of an update in an encoding."""
    layout = EncodedLayout.of(LAYOUT, spec)
    return pb.UpdateHeader(
        payloads=[pb.Payload(kind=pb.PAYLOAD_KIND_DELTA, manifest=layout.to_manifest())],
        size_bytes=layout.size_bytes if size is None else size,
        digest=digest_message(bytes(32)),
        num_examples=1,
        num_steps=1,
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("read_bytes", [64, 1 << 20])
def test_norms_are_those_of_the_decoded_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: EncodingSpec, read_bytes: int
) -> None:
    """And the digest is that of the file, for reads of any size."""
    monkeypatch.setattr(norms, "READ_BYTES", read_bytes)
    data, shape = encoded(spec), gate(spec).shape
    (tmp_path / "encoded").write_bytes(data)
    plain = pack(decode(data, shape.payloads[0].encoded, KEYS.of_payload("delta")), LAYOUT)
    (tmp_path / "plain").write_bytes(plain)
    digest, squares, wrong = digest_and_norms_of_encoded(EncodedUpdate(tmp_path / "encoded", shape, Decoding(KEYS)))
    _, expected = digest_and_norms(tmp_path / "plain", LAYOUT.entries)
    assert (digest, wrong) == (digest_of(data), "")
    assert squares == pytest.approx(expected, rel=1e-14)
    assert gate(spec).check_file(tmp_path / "encoded", digest)["delta"] == pytest.approx(
        math.sqrt(sum(expected[:2])), rel=1e-14
    )


def test_an_encoded_header_passes() -> None:
    """With the manifest and the size of the run's encoding."""
    gate().check_header(header())


@pytest.mark.parametrize(
    ("received", "reason", "message"),
    [
        (header(EncodingSpec("plain")), "LAYOUT", r"delta: expected encoding int8 \(6\), got number 1"),
        (header(EncodingSpec("int4")), "LAYOUT", "expected encoding int8 .* got number 7"),
        (header(size=LAYOUT.size_bytes), "SIZE", "expected 3"),
    ],
    ids=["plain", "int4", "size"],
)
def test_a_header_of_another_encoding_is_refused(received: pb.UpdateHeader, reason: str, message: str) -> None:
    """Before any of its bytes is received."""
    with pytest.raises(UpdateRefused, match=message) as refused:
        gate().check_header(received)
    assert refused.value.reason == getattr(pb, f"REFUSAL_REASON_{reason}")


def test_an_encoded_header_for_a_plain_run_is_refused() -> None:
    """Its manifest is not parsed as a plain one of these offsets."""
    with pytest.raises(UpdateRefused, match="expected encoding PLAIN"):
        gate(EncodingSpec("plain")).check_header(header())


def test_offsets_that_lie_are_refused() -> None:
    """Of a tensor that would begin in another one's section."""
    received = header()
    received.payloads[0].manifest.tensors[1].offset = 0
    with pytest.raises(UpdateRefused, match="tensor 'b': expected offset .* got 0"):
        gate().check_header(received)


def test_a_larger_update_than_allowed_is_refused() -> None:
    """The limit applies to encoded bytes."""
    size = gate().shape.size_bytes
    assert size < 3 * LAYOUT.size_bytes / 10
    gate(max_bytes=size).check_header(header())
    with pytest.raises(UpdateRefused, match=f"expected at most {size - 1} bytes"):
        gate(max_bytes=size - 1).check_header(header())


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3e38], ids=str)
def test_a_scale_that_no_encoder_writes_is_refused(tmp_path: Path, scale: float) -> None:
    """The digest of the bytes is right, so the client wrote them."""
    data = encoded()
    data[:4] = torch.tensor([scale]).numpy().tobytes()
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UpdateRefused, match="int8: tensor 'w': expected scales") as refused:
        gate().check_file(tmp_path / "x", digest_of(data))
    assert refused.value.reason == pb.REFUSAL_REASON_LAYOUT


def test_damaged_bytes_have_a_wrong_digest_first(tmp_path: Path) -> None:
    """It may be a fault of the disk, which another upload repairs: bytes of a wrong scale are no reason to refuse."""
    data = encoded()
    digest = digest_of(data)
    data[:4] = torch.tensor([math.nan]).numpy().tobytes()
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(WrongDigest):
        gate().check_file(tmp_path / "x", digest)


def test_a_buffer_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    """Buffers are plain inside an encoded update."""
    data = encoded(mean=torch.tensor([math.inf, 1.0]))
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UpdateRefused, match="tensor 'mean': expected finite values") as refused:
        gate().check_file(tmp_path / "x", digest_of(data))
    assert refused.value.reason == pb.REFUSAL_REASON_NOT_FINITE


def test_the_limit_of_norms_applies_to_decoded_values(tmp_path: Path) -> None:
    """And clips them."""
    data = encoded()
    (tmp_path / "x").write_bytes(data)
    norm = gate().check_file(tmp_path / "x", digest_of(data))["delta"]
    with pytest.raises(UpdateRefused, match=f"expected an update of norm 1 at most .*, got {norm:g}"):
        gate(max_norm=1.0).check_file(tmp_path / "x", digest_of(data))
    assert gate(clip_norm=norm / 4).clip_factor(norm) == 0.25
