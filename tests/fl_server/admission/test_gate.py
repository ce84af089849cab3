"""The admission gate: refused headers and files, with reason and message."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fl_server.admission import norms as module
from fl_server.admission.client_rules import UpdateRefused, WrongDigest
from fl_server.admission.gate import AdmissionGate
from fl_server.admission.norms import RelativeNorm
from fl_server.aggregation.updates import PayloadShape, UpdateShape
from protos.codec import Layout, digest_message, digest_of, pack
from protos.fl.v1 import training_pb2 as pb

TENSORS = {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(0), "mean": torch.tensor([100.0]), "n": torch.tensor(7)}
LAYOUT = Layout.of(TENSORS, trainable=("w", "b"))
TRAINABLE = Layout.of({name: TENSORS[name] for name in ("w", "b")}, trainable=("w", "b"))
SHAPE = UpdateShape.of(["delta"], LAYOUT, TRAINABLE)


def gate(**changes: Any) -> AdmissionGate:
    """A gate with these rules."""
    usual: dict[str, Any] = {"shape": SHAPE, "max_bytes": 1000, "max_norm": 0.0, "clip_norm": 0.0, "state_epoch": 0}
    return AdmissionGate(**{**usual, **changes})


def header(layout: Layout = LAYOUT, **changes: Any) -> pb.UpdateHeader:
    """A good header with these changes."""
    payload = pb.Payload(kind=pb.PAYLOAD_KIND_DELTA, manifest=layout.to_manifest())
    values: dict[str, Any] = {
        "payloads": [payload], "size_bytes": layout.size_bytes, "digest": digest_message(bytes(32)),
        "num_examples": 1, "num_steps": 1,
    }  # fmt: skip
    return pb.UpdateHeader(**{**values, **changes})


def layout_of(**tensors: torch.Tensor) -> Layout:
    """A layout of these tensors."""
    return Layout.of(tensors, trainable=[name for name in tensors if name in {"w", "b"}])


DELTA = pb.Payload(kind=pb.PAYLOAD_KIND_DELTA, manifest=LAYOUT.to_manifest())
OTHER = pb.Payload(kind=cast(pb.PayloadKind, 99), manifest=LAYOUT.to_manifest())


def test_a_good_header_passes() -> None:
    """Unchanged, with the largest number of examples, and with another epoch for a gate of that epoch."""
    gate().check_header(header())
    gate().check_header(header(num_examples=2**53))
    gate(state_epoch=2).check_header(header(state_epoch=2))


@pytest.mark.parametrize(
    ("received", "reason", "message"),
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
def test_a_wrong_header_is_refused(received: pb.UpdateHeader, reason: str, message: str) -> None:
    """With the reason for programs and a message for people."""
    with pytest.raises(UpdateRefused, match=message) as refused:
        gate().check_header(received)
    assert refused.value.reason == getattr(pb, f"REFUSAL_REASON_{reason}")


def test_a_model_over_the_limit_is_refused() -> None:
    """Also if layout and size agree."""
    with pytest.raises(UpdateRefused, match=r"expected 24 bytes \(limit 20\), got 24"):
        gate(max_bytes=20).check_header(header())


def written(tmp_path: Path, **changes: torch.Tensor) -> tuple[Path, bytes]:
    """A file of an update with these tensors, and its digest."""
    data = pack({**TENSORS, **changes}, LAYOUT)
    (tmp_path / "x").write_bytes(data)
    return tmp_path / "x", digest_of(data)


@pytest.mark.parametrize("block", [4, 1 << 20])
def test_the_norm_is_of_the_trainable_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """|(3, 4)| = 5 for any buffers and any block size."""
    monkeypatch.setattr(module, "READ_BYTES", block)
    assert gate().check_file(*written(tmp_path))["delta"] == 5.0


def test_a_norm_equal_to_the_limit_passes(tmp_path: Path) -> None:
    """A norm of 5 passes with a limit of 5, and not with 4.9."""
    assert gate(max_norm=5.0).check_file(*written(tmp_path))["delta"] == 5.0
    with pytest.raises(
        UpdateRefused, match="expected an update of norm 4.9 at most .round.max_update_norm., got 5"
    ) as refused:
        gate(max_norm=4.9).check_file(*written(tmp_path))
    assert refused.value.reason == pb.REFUSAL_REASON_NORM


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["w", "mean"])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, name: str, value: float) -> None:
    """In trainable tensors and in buffers. The message names the tensor."""
    tensor = TENSORS[name].clone()
    tensor[-1] = value
    with pytest.raises(
        UpdateRefused, match=f"tensor '{name}': expected finite values, got a NaN or an infinity"
    ) as refused:
        gate().check_file(*written(tmp_path, **{name: tensor}))
    assert refused.value.reason == pb.REFUSAL_REASON_NOT_FINITE


def test_the_largest_float32_is_finite(tmp_path: Path) -> None:
    """Its square overflows float32, so the sum is computed in float64."""
    largest = torch.full((2,), torch.finfo(torch.float32).max)
    norm = gate().check_file(*written(tmp_path, w=largest))["delta"]
    assert norm == pytest.approx(math.sqrt(2) * torch.finfo(torch.float32).max)


def test_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    """The message has both digests."""
    path, digest = written(tmp_path)
    with pytest.raises(WrongDigest, match="expected bytes with the digest blake3:0000.*, got blake3:") as wrong:
        gate().check_file(path, bytes(32))
    assert wrong.value.reason == pb.REFUSAL_REASON_DIGEST
    assert digest.hex() in str(wrong.value)


NAMED = UpdateShape.of(["delta", "moment"], LAYOUT, TRAINABLE)


def named(*names: str) -> pb.UpdateHeader:
    """A header with a delta and named payloads."""
    payloads = [pb.Payload(kind=pb.PAYLOAD_KIND_NAMED, manifest=TRAINABLE.to_manifest(), name=name) for name in names]
    return header(payloads=[DELTA, *payloads], size_bytes=NAMED.size_bytes)


def test_a_named_payload_is_admitted_by_its_name() -> None:
    """The header names it, and its norm in the result has that name."""
    gate(shape=NAMED).check_header(named("moment"))


def test_a_named_payload_has_a_norm_of_its_own(tmp_path: Path) -> None:
    """It is read from its place behind the delta."""
    path = tmp_path / "update"
    moment = {"w": torch.tensor([6.0, 8.0]), "b": torch.zeros(0)}
    data = bytes(pack(TENSORS, LAYOUT)) + bytes(pack(moment, TRAINABLE))
    path.write_bytes(data)
    norms = gate(shape=NAMED).check_file(path, digest_of(data))
    assert {name: norms[name] for name in ("delta", "moment")} == {"delta": 5.0, "moment": 10.0}


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (named("other"), "expected the payloads DELTA, NAMED 'moment', got DELTA, NAMED 'other'"),
        (named(""), "got DELTA, NAMED"),
        (named("moment", "moment"), "got DELTA, NAMED 'moment', NAMED 'moment'"),
        (named("x" * 10_000), f"got DELTA, NAMED '{'x' * 64}'"),
    ],
    ids=["another name", "no name", "twice", "long"],
)
def test_another_named_payload_is_refused(received: pb.UpdateHeader, message: str) -> None:
    """The refusal has the names, cut to the length of a valid one."""
    with pytest.raises(UpdateRefused, match=re.escape(message) + "$"):
        gate(shape=NAMED).check_header(received)


def test_a_byte_that_is_no_bool_is_refused(tmp_path: Path) -> None:
    """The reducer could not read it, so the update would end every attempt of its round."""
    layout = Layout.of({"w": torch.zeros(2), "flag": torch.tensor([True])}, trainable=("w",))
    data = bytearray(pack({"w": torch.ones(2), "flag": torch.tensor([True])}, layout))
    data[-1] = 2
    (tmp_path / "x").write_bytes(data)
    shape = UpdateShape((PayloadShape("delta", layout, 0),))
    with pytest.raises(UpdateRefused, match="'flag': expected bytes 0 and 1 for bool, got 2") as refused:
        gate(shape=shape).check_file(tmp_path / "x", digest_of(data))
    assert refused.value.reason == pb.REFUSAL_REASON_LAYOUT


def test_updates_of_a_group_pass_the_rules_of_one() -> None:
    """Several updates at once: each has the norms of one alone, or is left to the rules that refuse it alone."""
    shape = UpdateShape.of(["delta", "gradient"], TRAINABLE, TRAINABLE)
    limited = gate(
        shape=shape, max_norm=9.0, relative=RelativeNorm(2.0, 3.0), farthest={"gradient": 1e3},
        others={"gradient": RelativeNorm(3.0, 4.0)},
    )  # fmt: skip
    squares = [[first, 0.0, second, 0.1] for first in (0.3, 36.0, 37.0, 82.0) for second in (0.7, 143.0, 144.0, 1e7)]
    squares += [[math.nan, 0.0, 1.0, 0.0], [1.0, 0.0, math.inf, 0.0], [0.1 + 0.2, 0.3, 1e-30, 0.0]]
    refused = 0
    for row, found in zip(squares, limited.usual_norms(squares), strict=True):
        if found is None:
            refused += 1
            with pytest.raises(UpdateRefused):
                limited.check_values(Path("unread"), row)
        else:
            assert found == limited.check_values(Path("unread"), row)
    assert refused == len(squares) - 5


def test_an_update_that_its_client_did_not_clip_is_refused(tmp_path: Path) -> None:
    """Its norm is 5. The client was asked for 4.96: rounding may explain that, and it is scaled. 4.9 is refused."""
    rules = gate(clip_norm=4.96, clips_itself=True)
    assert rules.check_file(*written(tmp_path))["delta"] == 5.0
    assert rules.clip_factor(5.0) == 4.96 / 5.0
    with pytest.raises(
        UpdateRefused, match=r"expected an update that its client has clipped to a norm of 4.9 .* got a longer one"
    ):
        gate(clip_norm=4.9, clips_itself=True).check_file(*written(tmp_path))
    assert gate(clip_norm=4.9).check_file(*written(tmp_path))["delta"] == 5.0
