"""Names, numbers and keys of encodings, and received manifests."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.encoding_spec import EDEN, SPARSE, Dense, Encoding
from protos.encodings import ENCODINGS, EncodingSpec, encoding_key
from protos.encodings.eden import Eden
from protos.encodings.schemes import scheme_of
from protos.encodings.sparse import RandomK, TopK
from protos.fl.v1 import tensor_pb2
from protos.fl.v1.tensor_pb2 import Manifest
from tests.protos.encodings.cases import SPECS, encoded_layout, mixed

MAX_BYTES = 10**6


def test_every_number_of_the_contract_has_a_name() -> None:
    """The enum and the names have the same encodings."""
    numbers = {number for number in tensor_pb2.Encoding.values() if number}
    assert numbers == set(ENCODINGS.values())


def test_settings_take_the_names_of_the_contract() -> None:
    """In the contract's order; only an update may be encoded with values left out."""
    names = ("plain", "bf16", "int8", "int4", "int2", "eden4", "eden2", "eden1", "topk", "randk")
    assert get_args(Encoding) == tuple(ENCODINGS) == names == (*get_args(Dense), *SPARSE)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_name_has_the_code_of_its_kind(spec: EncodingSpec) -> None:
    """The names that rotate values, or leave some out, are those whose code does."""
    scheme = scheme_of(spec, torch.float32)
    assert (isinstance(scheme, Eden), isinstance(scheme, (TopK, RandomK))) == (spec.name in EDEN, spec.sparse)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_specs_survive_the_wire(spec: EncodingSpec) -> None:
    """The number, with the fraction beside it, gives the spec back."""
    assert EncodingSpec.from_wire(spec.wire, spec.fraction) == spec


@pytest.mark.parametrize("number", [0, 2, 3, 4, 14, -1, 2**31 - 1])
def test_unknown_numbers_are_refused(number: int) -> None:
    """The message has the known ones."""
    with pytest.raises(ValueError, match=rf"plain \(1\), bf16 \(5\), .*got number {number}"):
        EncodingSpec.from_wire(number)


@pytest.mark.parametrize(
    ("name", "fraction", "message"),
    [
        ("float8", 0.0, "expected an encoding of plain, bf16, .*got 'float8'"),
        ("topk", 0.0, "expected a fraction over 0 and up to 1 for topk, got 0.0"),
        ("topk", 1.1, "got 1.1"),
        ("randk", float("nan"), "got nan"),
        ("randk", -0.1, "got -0.1"),
        ("int8", 0.5, "expected no fraction for int8, got 0.5"),
        ("plain", float("nan"), "expected no fraction for plain, got nan"),
    ],
)
def test_wrong_specs_are_refused(name: str, fraction: float, message: str) -> None:
    """An unknown name, or a fraction that does not suit the name."""
    with pytest.raises(ValueError, match=message):
        EncodingSpec(name, fraction)


parts = st.lists(st.one_of(st.integers(), st.text()), max_size=4).map(tuple)


@given(first=parts, second=parts)
def test_keys_of_two_places_differ(first: tuple[int | str, ...], second: tuple[int | str, ...]) -> None:
    """Numbers and texts, and parts and their concatenation, are told apart."""
    assert (encoding_key(1, *first) == encoding_key(1, *second)) == (first == second)


def test_the_key_of_a_place_is_fixed() -> None:
    """Another version of the program finds the same key."""
    assert encoding_key(7, "update", 0, "delta").hex() == "3929a2bf1facae341d23de4e2e727728"


CHANGES: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "other encoding": (lambda m: setattr(m, "encoding", 6), r"expected encoding int4 \(7\), got number 6"),
    "unknown encoding": (lambda m: setattr(m, "encoding", 99), "got number 99"),
    "plain": (lambda m: setattr(m, "encoding", 1), "got number 1"),
    "too large": (lambda m: setattr(m, "size_bytes", MAX_BYTES + 1), "at most 1000000 bytes, got size_bytes 1000001"),
    "other size": (lambda m: setattr(m, "size_bytes", m.size_bytes + 1), "expected size_bytes 4766 for int4, got 4767"),
    "fewer tensors": (lambda m: m.tensors.pop(), "expected tensor 'kernel' at position 8, got none"),
    "more tensors": (lambda m: m.tensors.add(name="x"), "expected no tensor at position 9, got 'x'"),
    "other name": (
        lambda m: setattr(m.tensors[1], "name", "y" * 999),
        "expected tensor 'weight' at position 1, got 'y",
    ),
    "other dtype": (lambda m: setattr(m.tensors[1], "dtype", 2), "tensor 'weight': expected dtype 1, got 2"),
    "other shape": (lambda m: m.tensors[1].shape.append(1), r"expected shape \[70, 130\], got \[70, 130, 1\]"),
    "many sizes": (lambda m: m.tensors[1].shape.extend([1] * 999), r"got \[70, 130, 1, 1, .{0,70}$"),
    "not trainable": (lambda m: setattr(m.tensors[1], "trainable", False), "expected trainable True, got False"),
    "plain offset": (lambda m: setattr(m.tensors[2], "offset", 36404), "'running_mean': expected offset"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_manifests_that_differ_are_described(change: Callable[[Manifest], object], message: str) -> None:
    """A received manifest must be the one that this layout writes."""
    encoded = encoded_layout(mixed(), SPECS["int4"])
    manifest = encoded.to_manifest()
    assert encoded.difference_from(manifest, MAX_BYTES) is None
    change(manifest)
    difference = encoded.difference_from(manifest, MAX_BYTES)
    assert difference is not None
    assert re.search(message, difference), difference
    assert len(difference) < 300


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_own_manifests_do_not_differ(spec: EncodingSpec) -> None:
    """Every encoding, with a limit of exactly its size."""
    encoded = encoded_layout(mixed(), spec)
    assert encoded.difference_from(encoded.to_manifest(), encoded.size_bytes) is None
    assert encoded.difference_from(encoded.to_manifest(), encoded.size_bytes - 1) is not None
