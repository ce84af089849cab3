"""The gate: what is refused of a header and of a file, and in which words."""

from __future__ import annotations

import math

import pytest
import torch

from fl_server import admission, file_look
from fl_server.admission import Gate, Refused, WrongDigest, file_digest
from fl_server.shapes import UpdateShape
from protos.codec import Layout, digest_message, digest_of, pack
from protos.fl.v1 import training_pb2 as pb

TENSORS = {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(0), "mean": torch.tensor([100.0]), "n": torch.tensor(7)}
LAYOUT = Layout.of(TENSORS, trainable=("w", "b"))
TRAINABLE = Layout.of({name: TENSORS[name] for name in ("w", "b")}, trainable=("w", "b"))
SHAPE = UpdateShape.of(["delta"], LAYOUT, TRAINABLE)


def gate(**changes):
    """What a round asks for."""
    usual = {"shape": SHAPE, "max_bytes": 1000, "max_norm": 0.0, "clip_norm": 0.0, "state_epoch": 0}
    return Gate(**{**usual, **changes})


def header(layout=LAYOUT, **changes):
    """A good header, with something else in it."""
    payload = pb.Payload(kind=pb.PAYLOAD_KIND_DELTA, manifest=layout.to_manifest())
    values = {
        "payloads": [payload], "size_bytes": layout.size_bytes, "digest": digest_message(bytes(32)),
        "num_examples": 1, "num_steps": 1,
    }  # fmt: skip
    return pb.UpdateHeader(**{**values, **changes})


def layout_of(**tensors):
    """Another layout."""
    return Layout.of(tensors, trainable=[name for name in tensors if name in {"w", "b"}])


DELTA = pb.Payload(kind=pb.PAYLOAD_KIND_DELTA, manifest=LAYOUT.to_manifest())
OTHER = pb.Payload(kind=99, manifest=LAYOUT.to_manifest())


def test_a_good_header_passes():
    """As it is, with the largest number of examples, and for a gate of another epoch with that epoch."""
    gate().check_header(header())
    gate().check_header(header(num_examples=2**53))
    gate(state_epoch=2).check_header(header(state_epoch=2))


@pytest.mark.parametrize(
    ("came", "reason", "words"),
    [
        (
            header(num_examples=0),
            "HEADER",
            "expected 1 to 9007199254740992 examples and at least one step, got 0 and 1",
        ),
        (header(num_examples=2**53 + 1), "HEADER", "got 9007199254740993 and 1"),
        (header(num_steps=0), "HEADER", "got 1 and 0"),
        (header(state_epoch=3), "STATE_EPOCH", "expected client state of epoch 0, got 3: it restarts from zero"),
        (header(payloads=[]), "LAYOUT", "expected the payloads DELTA, got nothing"),
        (header(payloads=[DELTA, OTHER]), "LAYOUT", "got DELTA, 99"),
        (header(layout_of(w=torch.zeros(2))), "LAYOUT", "tensor 'b': expected shape .*, but it is missing"),
        (header(layout_of(**{f"w{at}": torch.zeros(0) for at in range(41)})), "LAYOUT", r"expected \d tensors, got 41"),
        (
            header(layout_of(**{**TENSORS, "w": torch.zeros(3)})),
            "LAYOUT",
            "tensor 'w': expected shape .2,. float32, got",
        ),
        (header(size_bytes=4), "SIZE", "expected 24 bytes .limit 1000., got 4"),
        (header(digest=pb.UpdateHeader().digest), "DIGEST", "expected digest algorithm BLAKE3_256, got number 0"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(came, reason, words):
    """Reason for programs, words for people."""
    with pytest.raises(Refused, match=words) as refused:
        gate().check_header(came)
    assert refused.value.reason == getattr(pb, f"REFUSAL_REASON_{reason}")


def test_a_model_over_the_limit_is_refused():
    """Also where layout and size agree; the manifest is not even read to its end."""
    with pytest.raises(Refused, match="expected at most 20 bytes, got size_bytes 24"):
        gate(max_bytes=20).check_header(header())


def written(tmp_path, **changes):
    """A file of these tensors, and its digest."""
    data = pack({**TENSORS, **changes}, LAYOUT)
    (tmp_path / "x").write_bytes(data)
    return tmp_path / "x", digest_of(data)


@pytest.mark.parametrize("block", [4, 1 << 20])
def test_the_norm_is_of_what_is_trained(tmp_path, monkeypatch, block):
    """|(3, 4)| = 5, whatever the buffers are, and however the file is cut."""
    monkeypatch.setattr(file_look, "READ_BYTES", block)
    assert gate().check_file(*written(tmp_path))["delta"] == 5.0


def test_a_limit_of_the_norm_includes_itself(tmp_path):
    """5 passes where 5 is allowed, and not where 4.9 is."""
    assert gate(max_norm=5.0).check_file(*written(tmp_path))["delta"] == 5.0
    with pytest.raises(Refused, match="expected an update of norm 4.9 at most, got 5") as refused:
        gate(max_norm=4.9).check_file(*written(tmp_path))
    assert refused.value.reason == pb.REFUSAL_REASON_NORM


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["w", "mean"])
def test_values_that_are_not_finite_are_refused(tmp_path, name, value):
    """In what is trained and in buffers alike, by the tensor's name."""
    tensor = TENSORS[name].clone()
    tensor[-1] = value
    with pytest.raises(Refused, match=f"tensor '{name}': expected finite values, got a NaN or an infinity") as refused:
        gate().check_file(*written(tmp_path, **{name: tensor}))
    assert refused.value.reason == pb.REFUSAL_REASON_NOT_FINITE


def test_the_largest_float32_is_finite(tmp_path):
    """Its square overflows float32, and the sum is made in float64."""
    largest = torch.full((2,), torch.finfo(torch.float32).max)
    norm = gate().check_file(*written(tmp_path, w=largest))["delta"]
    assert norm == pytest.approx(math.sqrt(2) * torch.finfo(torch.float32).max)


def test_other_bytes_than_announced_are_told_apart(tmp_path):
    """Both digests are in the message; the reason is the digest's."""
    path, digest = written(tmp_path)
    with pytest.raises(WrongDigest, match="expected bytes with the digest blake3:0000.*, got blake3:") as wrong:
        gate().check_file(path, bytes(32))
    assert wrong.value.reason == pb.REFUSAL_REASON_DIGEST
    assert digest.hex() in str(wrong.value)


def test_the_digest_of_a_file_in_pieces(tmp_path, monkeypatch):
    """Reading three bytes at a time names the same bytes."""
    monkeypatch.setattr(admission, "_READ_BYTES", 3)
    path, digest = written(tmp_path)
    assert file_digest(path) == digest
