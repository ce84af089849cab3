"""The comments of the contract are enough to write a decoder, and it gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protos.encodings import EncodingSpec, decode, encode
from protos.encodings.random_words import RandomWords
from tests.marks import slow_except
from tests.protos.encodings.cases import ENCODED, KEY, encoded_layout, noise
from tests.protos.encodings.second_implementation import Decoder, philox, random_bytes


def test_philox_has_the_words_of_its_authors() -> None:
    """The known answers of Random123 (kat_vectors) for philox4x64-10: zeros, ones, and digits of pi."""
    assert philox((0, 0), (0, 0, 0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    ones = 2**64 - 1
    assert philox((ones, ones), (ones, ones, ones, ones))[0] == 0x87B092C3013FE90B


def test_words_are_those_of_the_contract() -> None:
    """Any block's words are found without those before it, and successive blocks continue the stream."""
    words = RandomWords(KEY)
    for tensor, block in ((0, 0), (0, 1), (3, 1), (3, 70_000), (0, 2), (0, 3)):
        words.seek(tensor, block * 64)
        assert words.take(64).tobytes() == random_bytes(KEY, tensor, block, 512)


@pytest.mark.parametrize(
    "spec",
    slow_except(ENCODED.values(), *(spec for name, spec in ENCODED.items() if not name.startswith("eden"))),
    ids=ENCODED,
)
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "f"), (torch.float64, "d")], ids=["float32", "float64"])
def test_a_decoder_from_the_contract_gives_the_same_bits(spec: EncodingSpec, dtype: torch.dtype, kind: str) -> None:
    """Full and short blocks of three tensors."""
    tensors = {"weight": noise(4096 + 700, dtype=dtype), "bias": noise(37, dtype=dtype), "scale": noise(dtype=dtype)}
    encoded = encoded_layout(tensors, spec)
    buffer = encode(tensors, encoded, KEY)
    decoded = decode(buffer, encoded, KEY)
    for number, (name, section) in enumerate(zip(tensors, encoded.sections, strict=True)):
        raw = bytes(buffer[section.offset : section.offset + section.nbytes])
        values = Decoder(raw, kind, KEY, number).decode(spec.name, tensors[name].numel(), spec.fraction)
        assert np.array_equal(values, decoded[name].reshape(-1).numpy())
