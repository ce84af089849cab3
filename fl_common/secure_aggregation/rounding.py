"""How updates become whole numbers in a secure aggregation: what the terms say of it, and the keys of its streams."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from fl_common.privacy.secret_stream import SECRET_BYTES, derived


@dataclass(frozen=True, slots=True)
class Rounding:
    """The text `Terms.quantizer`: all clients of a cohort round in the same way."""

    clip: float
    """C, the largest L2 norm of an update."""
    bits: int
    """b, the bits of a number."""
    rotation: str
    """Key of the rotation that all clients share, SECRET_BYTES in hex."""
    max_examples: int = 0
    """Examples of a client with the weight 1; 0: all clients weigh the same."""

    def __post_init__(self) -> None:
        if not 0.0 < self.clip < math.inf or len(bytes.fromhex(self.rotation)) != SECRET_BYTES or self.max_examples < 0:
            raise ValueError(f"expected a clip over 0, a rotation of {SECRET_BYTES} bytes and counts, got {self}")

    def to_text(self) -> str:
        """The text of the terms."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> Rounding:
        """The rounding of `to_text`. Raises ValueError for anything else."""
        try:
            return Rounding(**json.loads(text))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"expected the rounding of a secure aggregation: {error}") from None

    @property
    def rotation_key(self) -> bytes:
        """The key of the rotation."""
        return bytes.fromhex(self.rotation)

    def counted(self, examples: int) -> int:
        """The number whose sum gives the weights: the client's examples up to the most, or 1."""
        return min(examples, self.max_examples) if self.max_examples else 1

    def weight(self, examples: int) -> float:
        """w of a client, over 0 and at most 1."""
        return self.counted(examples) / (self.max_examples or 1)


def rounding_key(seed: int, exchange: int) -> bytes:
    """The key of a client's own rounding. seed: its training seed of the round, which no other client knows."""
    return derived(seed.to_bytes(SECRET_BYTES, "big"), "rounding", exchange)


def rotation_key(seed: int, round_: int, draw: int, exchange: int) -> bytes:
    """The key of a round's rotation. seed: the run's."""
    return derived(seed.to_bytes(SECRET_BYTES, "big"), "rotation", round_, draw, exchange)
