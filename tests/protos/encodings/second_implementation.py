"""A slow decoder of one tensor, written from the comments of protos/fl/v1/tensor.proto and from nothing else."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
EDEN_LEVELS = {1: [817], 2: [464, 1547], 4: [131, 397, 673, 965, 1286, 1657, 2119, 2798]}


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox 4x64-10 (Salmon et al., SC 2011): four words of 64 bits."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(second >> 64) ^ c[1] ^ k[0], second & _MASK, (first >> 64) ^ c[3] ^ k[1], first & _MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & _MASK, (k[1] + 0xBB67AE8584CAA73B) & _MASK]
    return c


def random_bytes(key: bytes, tensor: int, block: int, nbytes: int) -> bytes:
    """The random bytes of a block."""
    first, second = struct.unpack("<2Q", key)
    begin = nbytes * block // 32
    words = (philox((first, second), (begin + j + 1, 0, tensor, 0)) for j in range(nbytes // 32))
    return b"".join(struct.pack("<4Q", *word) for word in words)


def fields(raw: bytes, count: int, bits: int) -> list[int]:
    """Fields of some bits."""
    whole = int.from_bytes(raw, "little")
    return [whole >> bits * i & 2**bits - 1 for i in range(count)]


Number = np.float32 | np.float64


class Decoder:
    """Reads the values of one tensor of float32 ("f") or float64 ("d")."""

    def __init__(self, raw: bytes, kind: str, key: bytes, tensor: int) -> None:
        self.raw, self.kind, self.key, self.tensor, self.at = raw, kind, key, tensor, 0
        self.type: Callable[[float], Number] = np.float32 if kind == "f" else np.float64

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        self.at += nbytes
        return self.raw[self.at - nbytes : self.at]

    def numbers(self, count: int) -> list[Number]:
        """The next numbers of the tensor's type."""
        return [
            self.type(x) for x in struct.unpack(f"<{count}{self.kind}", self.take(count * struct.calcsize(self.kind)))
        ]

    def bf16(self, n: int) -> list[Number]:
        """A bfloat16 is the upper half of a float32."""
        return [self.type(struct.unpack("<f", bytes(2) + self.take(2))[0]) for _ in range(n)]

    def integers(self, n: int, bits: int) -> list[Number]:
        """A scale and levels in two's complement."""
        (s,) = self.numbers(1)
        q = fields(self.take(math.ceil(n * bits / 8)), n, bits)
        return [s * self.type(number - 2**bits if number >= 2 ** (bits - 1) else number) for number in q]

    def eden(self, n: int, block: int, bits: int) -> list[Number]:
        """A scale and indices of levels."""
        order = 2 ** math.ceil(math.log2(n))
        (s,) = self.numbers(1)
        upper = EDEN_LEVELS[bits]
        levels = [-level for level in reversed(upper)] + upper
        c = [levels[index] for index in fields(self.take(math.ceil(order * bits / 8)), order, bits)]
        h = math.floor(math.log2(order) / 2)
        signs = fields(random_bytes(self.key, self.tensor, block, 512), n, 1)
        sums = (sum(-x if (i & j).bit_count() % 2 else x for j, x in enumerate(c)) for i in range(n))
        return [
            s * self.type(total / 2 ** (10 + h)) * (-1 if sign else 1) for total, sign in zip(sums, signs, strict=True)
        ]

    def topk(self, n: int, fraction: float) -> list[Number]:
        """Positions, then values."""
        k = math.ceil(fraction * n)
        return self.placed(n, list(struct.unpack(f"<{k}H", self.take(2 * k))))

    def randk(self, n: int, block: int, fraction: float) -> list[Number]:
        """Values at positions that are drawn."""
        drawn = fields(random_bytes(self.key, self.tensor, block, 8192), n, 16)
        order = sorted(range(n), key=lambda i: 4096 * drawn[i] + i)
        return self.placed(n, sorted(order[: math.ceil(fraction * n)]))

    def placed(self, n: int, positions: list[int]) -> list[Number]:
        """The next values at these positions, 0 elsewhere."""
        found = dict(zip(positions, self.numbers(len(positions)), strict=True))
        return [found.get(i, self.type(0)) for i in range(n)]

    def decode(self, name: str, numel: int, fraction: float) -> npt.NDArray[np.floating]:
        """All values of the tensor."""
        length = {"b": numel, "i": 256}.get(name[0], 4096)
        values = [value for n, block in blocks(numel, length) for value in self.block(name, n, block, fraction)]
        assert self.at == len(self.raw)
        return np.array(values)

    def block(self, name: str, n: int, block: int, fraction: float) -> list[Number]:
        """The n values of the next block."""
        if name == "bf16":
            return self.bf16(n)
        if name.startswith("int"):
            return self.integers(n, int(name[3:]))
        if name == "topk":
            return self.topk(n, fraction)
        return self.randk(n, block, fraction) if name == "randk" else self.eden(n, block, int(name[4:]))


def blocks(numel: int, length: int) -> Iterator[tuple[int, int]]:
    """(values, number) of each block."""
    for number in range(math.ceil(numel / length)):
        yield min(length, numel - number * length), number
