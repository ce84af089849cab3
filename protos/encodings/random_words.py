"""Random words for encodings: Philox 4x64, addressed by key, tensor and block.

Philox is a function of a key and a counter (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), so
a peer finds the words of one block without those of the blocks before it. numpy guarantees the raw words of its bit
generators; it does not guarantee the values that its distributions make of them, so none is used here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protos.digests import digest_of

KEY_BYTES = 16
_WORDS_PER_COUNT = 4


def encoding_key(seed: int, *place: int | str) -> bytes:
    """The 16 bytes that key the random words of one bundle: the start of a BLAKE3-256 digest.

    The digest is over the text "encoding key;" followed by "i<number>;" or "s<length in UTF-8 bytes>:<text>;" for the
    seed and each part of the place. No two places have the same text. For an update the place is ("update", exchange,
    payload) and the seed that of the assignment; for a broadcast it is ("broadcast", round, kind) and that of the run.
    """
    parts = (f"s{len(part.encode())}:{part};" if isinstance(part, str) else f"i{part};" for part in (seed, *place))
    return digest_of(f"encoding key;{''.join(parts)}".encode())[:KEY_BYTES]


class RandomWords:
    """The random words of a bundle, of 64 bits each.

    The words of tensor t are a stream: words 4 i to 4 i + 3 are the outputs of Philox 4x64-10 for the counter
    (i + 1, 0, t, 0), least significant word first. The key has two words, little-endian, in the order of its bytes.
    """

    def __init__(self, key: bytes) -> None:
        """key: 16 bytes. Raises ValueError for any other number of bytes."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(key)}; encoding_key makes one")
        words = np.frombuffer(key, "<u8").astype(np.uint64)
        self._generator = np.random.Philox(key=words)
        self._key = words
        self._at = (-1, -1)

    def seek(self, tensor: int, word: int) -> None:
        """Continue with this word of the stream of a tensor. word: a multiple of 4."""
        if self._at == (tensor, word):
            return
        self._at = (tensor, word)
        counter = np.array([word // _WORDS_PER_COUNT, 0, tensor, 0], np.uint64)
        self._generator.state = {
            "bit_generator": "Philox",
            "state": {"key": self._key, "counter": counter},
            "buffer": np.zeros(_WORDS_PER_COUNT, np.uint64),
            "buffer_pos": _WORDS_PER_COUNT,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def take(self, count: int) -> npt.NDArray[np.uint64]:
        """The next `count` words: a multiple of 4."""
        self._at = (self._at[0], self._at[1] + count)
        return np.asarray(self._generator.random_raw(count), dtype="<u8")
