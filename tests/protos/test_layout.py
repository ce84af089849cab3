"""Layouts: untrusted manifests, and descriptions of differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.codec import Layout, LayoutError
from protos.digests import digest_of
from protos.fl.v1.tensor_pb2 import DTYPE_BOOL, DTYPE_FLOAT32, DTYPE_FLOAT64, Manifest, TensorSpec

MAX_BYTES = 1000
EXPECTED = {"fc.weight": torch.zeros(10, 64), "fc.bias": torch.zeros(10)}

Corruption = Callable[[Manifest], object]


def manifest() -> Manifest:
    """a: 3 bools at 0; b: [2, 4] float32 at 4; c: a float64 scalar at 40. 48 bytes."""
    tensors = {
        "a": torch.zeros(3, dtype=torch.bool),
        "b": torch.zeros(2, 4),
        "c": torch.tensor(0.0, dtype=torch.float64),
    }
    return Layout.of(tensors, trainable=["b"]).to_manifest()


CORRUPTIONS: dict[str, tuple[Corruption, str]] = {
    "encoding not given": (lambda m: m.ClearField("encoding"), "expected encoding PLAIN"),
    "encoding of the future": (lambda m: setattr(m, "encoding", 77), "got number 77"),
    "over the limit": (
        lambda m: setattr(m, "size_bytes", MAX_BYTES + 1),
        "expected at most 1000 bytes, got size_bytes 1001",
    ),
    "too many tensors": (lambda m: m.tensors.extend([TensorSpec()] * 100_000), "expected at most 100000 tensors"),
    "empty name": (lambda m: setattr(m.tensors[1], "name", ""), "expected a name of 1 to 512 characters, got 0"),
    "endless name": (lambda m: setattr(m.tensors[1], "name", "x" * 513), "got 513"),
    "same name twice": (lambda m: setattr(m.tensors[1], "name", "a"), "tensor 'a': expected every name once"),
    "dtype not given": (
        lambda m: m.tensors[1].ClearField("dtype"),
        "tensor 'b': expected a dtype of float32, .*got number 0",
    ),
    "dtype of the future": (lambda m: setattr(m.tensors[1], "dtype", 99), "got number 99"),
    "negative size": (lambda m: m.tensors[1].shape.__setitem__(0, -2), "'b': expected sizes of 0 and more"),
    "two negative sizes": (
        lambda m: m.tensors[1].shape.__setitem__(slice(None), [-2, -4]),
        "expected sizes of 0 and more",
    ),
    "too large a tensor": (
        lambda m: m.tensors[1].shape.__setitem__(0, 1000),
        "'b': expected an end within 1000 bytes, got 16004",
    ),
    "product over 64 bits": (lambda m: m.tensors[1].shape.extend([2**40, 2**40]), "that a machine can hold"),
    "overflow behind a zero": (lambda m: m.tensors[1].shape.extend([0, 2**62]), "that a machine can hold"),
    "too many dimensions": (lambda m: m.tensors[1].shape.extend([1] * 63), "at most 64 dimensions, got 65"),
    "overlap": (lambda m: setattr(m.tensors[1], "offset", 0), "'b': expected offset 4 .*got 0"),
    "misaligned": (lambda m: setattr(m.tensors[1], "offset", 3), "'b': expected offset 4 .*got 3"),
    "gap": (lambda m: setattr(m.tensors[1], "offset", 8), "'b': expected offset 4 .*got 8"),
    "order": (lambda m: m.tensors.reverse(), "'c': expected offset 0 .*got 40"),
    "size too small": (lambda m: setattr(m, "size_bytes", 47), "expected size_bytes 48 .*got 47"),
    "size too large": (lambda m: setattr(m, "size_bytes", 49), "expected size_bytes 48 .*got 49"),
}


def test_the_offsets_are_aligned_to_the_element() -> None:
    """3 bools end at 3, so float32 starts at 4 and ends at 4 + 8 * 4 = 36; float64 starts at 40 and ends at 48."""
    layout = Layout.from_manifest(manifest(), MAX_BYTES)
    assert [entry.offset for entry in layout.entries] == [0, 4, 40]
    assert layout.size_bytes == 48


@pytest.mark.parametrize(("corrupt", "words"), CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_a_corrupt_manifest_is_refused_with_a_message(corrupt: Corruption, words: str) -> None:
    """Each wrong field has its own message, and none needs memory for the announced tensors."""
    broken = manifest()
    corrupt(broken)
    with pytest.raises(LayoutError, match=words):
        Layout.from_manifest(broken, MAX_BYTES)


specs = st.builds(
    TensorSpec,
    name=st.text(max_size=2),
    dtype=st.sampled_from([0, DTYPE_FLOAT32, DTYPE_FLOAT64, DTYPE_BOOL, 99]),
    shape=st.lists(st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), max_size=3),
    offset=st.one_of(st.integers(0, 64), st.integers(0, 2**64 - 1)),
)
manifests = st.builds(
    Manifest,
    tensors=st.lists(specs, max_size=3),
    size_bytes=st.integers(0, 2**64 - 1) | st.integers(0, 99),
    encoding=st.just(1),
)


@given(manifests)
def test_an_accepted_manifest_is_canonical(sent: Manifest) -> None:
    """Any manifest is either refused with LayoutError or read into a layout that writes the very same manifest."""
    try:
        layout = Layout.from_manifest(sent, MAX_BYTES)
    except LayoutError:
        return
    assert layout.to_manifest() == sent
    assert layout.size_bytes <= MAX_BYTES


def test_a_dtype_without_a_name_on_the_wire_is_refused() -> None:
    """Complex numbers are not supported; the message lists the supported dtypes."""
    with pytest.raises(LayoutError, match=r"tensor 'z': expected a dtype of float32, .*got torch\.complex64"):
        Layout.of({"z": torch.zeros(2, dtype=torch.complex64)})


def test_a_trainable_name_must_be_a_tensor() -> None:
    """A misspelt name would silently freeze a parameter."""
    with pytest.raises(LayoutError, match="got the unknown name 'fc\\.wieght'"):
        Layout.of(EXPECTED, trainable=["fc.wieght"])


def test_equal_layouts_have_no_difference() -> None:
    """Values do not matter, only names, shapes, dtypes, order and marks."""
    assert Layout.of(EXPECTED).difference(Layout.of({name: t + 1 for name, t in EXPECTED.items()})) is None


DIFFERENCES = {
    "shape": (
        {**EXPECTED, "fc.weight": torch.zeros(10, 32)},
        "tensor 'fc.weight': expected shape (10, 64) float32, got (10, 32) float32",
    ),
    "dtype": (
        {**EXPECTED, "fc.bias": torch.zeros(10, dtype=torch.float64)},
        "tensor 'fc.bias': expected shape (10,) float32, got (10,) float64",
    ),
    "missing": (
        {"fc.weight": torch.zeros(10, 64)},
        "tensor 'fc.bias': expected shape (10,) float32, but it is missing",
    ),
    "extra": ({**EXPECTED, "scale": torch.zeros(())}, "tensor 'scale': not expected, got shape () float32"),
    "order": (
        dict(reversed(EXPECTED.items())),
        "order: expected tensor 'fc.weight' at position 0, got 'fc.bias'",
    ),
}


@pytest.mark.parametrize(("came", "words"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_the_first_difference_is_described(came: dict[str, torch.Tensor], words: str) -> None:
    """A device owner must see which tensor is wrong, and how."""
    assert Layout.of(EXPECTED).difference(Layout.of(came)) == words


def test_another_trainable_mark_is_a_difference() -> None:
    """Two sides that freeze different tensors do not train the same model."""
    difference = Layout.of(EXPECTED, ["fc.bias"]).difference(Layout.of(EXPECTED))
    assert difference == "tensor 'fc.bias': expected trainable = True, got False"


def test_bundles_of_the_same_bytes_and_other_tensors_have_other_names() -> None:
    """A model of zeros cut in another way must not be taken for the one that a client holds."""
    one, two = Layout.of({"a": torch.zeros(4)}), Layout.of({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert one.digest(bytes(16)) == one.digest(bytes(16))
    assert one.digest(bytes(16)) != two.digest(bytes(16))


def test_a_bundle_is_named_by_its_table_and_its_bytes() -> None:
    """The table has the contract's format, so that a client in any language can check a name."""
    layout = Layout.of({"fc.bias": torch.zeros(2, 3)}, ["fc.bias"])
    assert layout.digest(b"x" * 24) == digest_of(b"7:fc.bias float32 2,3 1\n" + b"x" * 24)
