"""What all clients of one secure aggregation have to agree on: the place, the cohort, the settings, the numbers.

Every signature of the protocol is over the digest of the terms. So a coordinator that tells clients different terms
gets no answers that fit together.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property

from fl_common.names import check_id
from fl_common.secure_aggregation.fields import digest_of, in_order

LEAST_CLIENTS = 3
"""With two, each knows the other's update from the sum and its own."""
MOST_CLIENTS = 10_000
SUITES = ("aes-256-ctr", "chacha20")
"""Names of the generators of masks: see `masks.py`."""
_MOST_SHARE = 1 / 3
_MOST_TEXT = 4096
_MOST_SCALARS = 64


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where in a run a client gives one masked update at most. Places of one run are ordered."""

    run: str
    """The run's id, and that of its coordinator if clients work for several."""
    round: int
    draw: int = 0
    """How many draws of this round were abandoned before."""
    exchange: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.run) <= _MOST_TEXT or min(self.round, self.draw, self.exchange) < 0:
            raise ValueError(f"expected a run, and a round, draw and exchange of at least 0, got {self}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that bound what a coordinator can learn."""

    min_clients: int = LEAST_CLIENTS
    """The fewest clients whose updates may be summed."""
    max_corrupt: float = 0.1
    """The share of the clients that may help the coordinator; below 1/3."""
    max_dropped: float = 0.1
    """The share of the clients that may drop out; below 1/3."""
    suite: str = SUITES[0]
    """The generator of masks."""

    def __post_init__(self) -> None:
        if not LEAST_CLIENTS <= self.min_clients <= MOST_CLIENTS:
            raise ValueError(f"min_clients: expected {LEAST_CLIENTS} to {MOST_CLIENTS}, got {self.min_clients}")
        for name, share in (("max_corrupt", self.max_corrupt), ("max_dropped", self.max_dropped)):
            if not 0.0 <= share < _MOST_SHARE:
                raise ValueError(f"{name}: expected a share of at least 0 and below 1/3, got {share}")
        if self.suite not in SUITES:
            raise ValueError(f"suite: expected one of {', '.join(SUITES)}, got {self.suite!r}")


@dataclass(frozen=True, slots=True)
class SiteFloors:
    """What a client's site asks of the terms, whatever a coordinator wants."""

    min_clients: int = LEAST_CLIENTS
    """The fewest clients whose updates may be summed."""
    max_corrupt: float = 0.0
    """The least share of the clients that the terms have to assume to help the coordinator."""


@dataclass(frozen=True)
class Terms:
    """The terms of one secure aggregation."""

    place: Place
    attempt: int
    """Attempts of one place have fresh keys. Once a client has released a masked update it answers only that one."""
    cohort: tuple[str, ...]
    """The drawn clients, in the order of id bytes."""
    values: int
    """Numbers of an update that are summed modulo 2^value_bits."""
    value_bits: int
    """A multiple of 8: see `value_bits_for`."""
    scalars: int = 0
    """Further numbers, such as a weight, that are summed modulo 2^64."""
    settings: Settings = field(default_factory=Settings)
    quantizer: str = ""
    """How the numbers are made of an update, as a text that the protocol does not read."""

    def __post_init__(self) -> None:
        if not in_order(self.cohort) or not LEAST_CLIENTS <= len(self.cohort) <= MOST_CLIENTS:
            raise ValueError(
                f"cohort: expected {LEAST_CLIENTS} to {MOST_CLIENTS} ids in order, got {len(self.cohort)}"
                f"{'' if in_order(self.cohort) else ' in another order'}"
            )
        for client in self.cohort:
            check_id("client id", client)
        if self.attempt < 0 or self.values < 1 or not 0 <= self.scalars <= _MOST_SCALARS:
            raise ValueError(f"expected an attempt, values over 0 and at most {_MOST_SCALARS} scalars, got {self}")
        if self.value_bits not in range(8, 65, 8) or len(self.quantizer) > _MOST_TEXT:
            raise ValueError(f"value_bits: expected a multiple of 8 from 8 to 64, got {self.value_bits}")

    @property
    def size_bytes(self) -> int:
        """Bytes of a masked update."""
        return self.values * (self.value_bits // 8) + 8 * self.scalars

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the terms."""
        return digest_of("terms", self.to_bytes())

    def to_bytes(self) -> bytes:
        """The terms as JSON, in one form only."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Terms:
        """The terms of `to_bytes`. Raises ValueError for anything else."""
        try:
            raw = json.loads(data)
            place, settings = Place(**raw.pop("place")), Settings(**raw.pop("settings"))
            terms = Terms(**{**raw, "cohort": tuple(raw["cohort"]), "place": place, "settings": settings})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"expected the terms of a secure aggregation: {error}") from None
        if terms.to_bytes() != data:
            raise ValueError("expected the terms of a secure aggregation in their one form, got another form")
        return terms


def value_bits_for(bits: int, clients: int) -> int:
    """The fewest bits, in whole bytes, in which numbers of so many bits from so many clients can be summed."""
    return 8 * -(-(bits + (max(clients, 1) - 1).bit_length()) // 8)
