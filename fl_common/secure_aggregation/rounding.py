"""How updates become whole numbers in a secure aggregation: what the terms say of it, and the keys of its streams."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from fl_common.privacy.secret_stream import SECRET_BYTES, derived


@dataclass(frozen=True, slots=True)
class RoundedPayload:
    """One of the payloads of an update. Its numbers have a range, a rotation and a rounding of their own."""

    payload: str
    """Its name. Two may be of one payload, with other weights."""
    clip: float
    """C, the largest L2 norm of the payload."""
    by_examples: bool = False
    """Whether its weight is proportional to the client's examples."""
    per_step: bool = False
    """Whether its weight is divided by the client's steps."""

    def __post_init__(self) -> None:
        if not 0.0 < self.clip < math.inf:
            raise ValueError(f"expected a clip over 0, got {self}")


@dataclass(frozen=True, slots=True)
class Rounding:
    """The text `Terms.quantizer`: all clients of a cohort round in the same way."""

    bits: int
    """b, the bits of a number."""
    rotation: str
    """The key, SECRET_BYTES in hex, of the rotations that all clients share."""
    payloads: tuple[RoundedPayload, ...]
    """What is summed, in the order of the numbers of an update."""
    max_examples: int = 0
    """Examples of a client with the weight 1; 0: all clients weigh the same."""
    min_steps: int = 0
    """Steps of a client with the weight 1, if a weight is divided by them; else 0."""
    metrics: tuple[str, ...] = ()
    """Metrics of the received model that clients measure in this round; empty: none."""
    loss: bool = True
    """Whether clients contribute their training loss."""

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.rotation)) != SECRET_BYTES or min(self.max_examples, self.min_steps) < 0:
            raise ValueError(f"expected a rotation of {SECRET_BYTES} bytes, and counts, got {self}")
        by_examples, per_step = (any(getattr(it, of) for it in self.payloads) for of in ("by_examples", "per_step"))
        if (by_examples and not self.max_examples) or (per_step and not self.min_steps):
            raise ValueError(f"expected the most examples or the fewest steps of a client for its weight, got {self}")
        if not self.payloads:
            raise ValueError("expected at least one payload, got none")

    def to_text(self) -> str:
        """The text of the terms."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> Rounding:
        """The rounding of `to_text`. Raises ValueError for anything else."""
        try:
            raw = json.loads(text)
            payloads = tuple(RoundedPayload(**it) for it in raw["payloads"])
            return Rounding(**{**raw, "payloads": payloads, "metrics": tuple(raw["metrics"])})
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"expected the rounding of a secure aggregation: {error}") from None

    def rotation_key(self, number: int) -> bytes:
        """The key of the rotation of a payload, by its number."""
        return derived(bytes.fromhex(self.rotation), "payload", number)

    def counted(self, examples: int) -> int:
        """The number whose sum gives the weights: the client's examples up to the most, or 1."""
        return min(examples, self.max_examples) if self.max_examples else 1

    def weight(self, number: int, examples: int, steps: int) -> float:
        """w of a client in the sum of a payload, over 0 and at most 1."""
        rule, weight = self.payloads[number], 1.0
        if rule.by_examples:
            weight *= self.counted(examples) / self.max_examples
        if rule.per_step:
            weight *= self.min_steps / max(steps, self.min_steps)
        return weight


def rounding_key(seed: int, exchange: int, number: int) -> bytes:
    """The key of a client's own rounding of a payload, by its number in the rounding.

    seed: the client's training seed of the round, which no other client knows.
    """
    return derived(seed.to_bytes(SECRET_BYTES, "big"), "rounding", exchange, number)


def rotation_key(seed: int, round_: int, draw: int, exchange: int) -> bytes:
    """The key of a round's rotations. seed: the run's."""
    return derived(seed.to_bytes(SECRET_BYTES, "big"), "rotation", round_, draw, exchange)
