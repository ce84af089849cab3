"""What a round knows of single clients: their updates in order of arrival, failures, refusals and lost states.

A round of four thousand clients adds four thousand updates, one by one, and asks for each whether its client has
delivered before. A tuple would be copied and searched each time, so `Arrivals` adds one more in constant time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Self, TypeVar, overload

from fl_server.rounds.events import Fault

T = TypeVar("T")

Entry = tuple[str, bytes]
"""(client, digest)."""


class Arrivals(Sequence[Entry]):
    """An immutable sequence of (client, digest), one for each client. Equal to a tuple with the same entries.

    All values that grew from one another share one dictionary. Each of them sees only its own beginning of it.
    """

    __slots__ = ("_count", "_places", "_shared")

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        """Raises ValueError if a client comes twice."""
        self._shared = list(entries)
        self._places = {client: place for place, (client, _) in enumerate(self._shared)}
        self._count = len(self._shared)
        if len(self._places) != self._count:
            raise ValueError(f"expected one update of each client, got {self._shared}")

    def added(self, client: str, digest: bytes) -> Self:
        """These and one more. Raises ValueError for a client that is here."""
        return self.with_all(((client, digest),))

    def with_all(self, entries: Sequence[Entry]) -> Self:
        """These and some more. Raises ValueError for a client that is here, or comes twice."""
        clients = [client for client, _ in entries]
        if len(set(clients)) < len(clients) or any(map(self.has, clients)):
            raise ValueError(f"expected clients without an update, got {', '.join(clients)}")
        if len(self._shared) != self._count:  # another value has grown from this one
            return type(self)((*self, *entries))
        grown = object.__new__(type(self))
        grown._shared, grown._places, grown._count = self._shared, self._places, self._count + len(entries)
        self._shared.extend(entries)
        self._places.update({client: self._count + at for at, client in enumerate(clients)})
        return grown

    def has(self, client: str) -> bool:
        """Whether the client has delivered."""
        return self._places.get(client, self._count) < self._count

    def clients(self, start: int = 0) -> Iterator[str]:
        """The clients from a place on."""
        return (client for client, _ in islice(self._shared, start, self._count))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Entry: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, place: int | slice) -> Entry | tuple[Entry, ...]:
        if isinstance(place, slice):
            return tuple(self._shared[at] for at in range(*place.indices(self._count)))
        return self._shared[range(self._count)[place]]

    def __iter__(self) -> Iterator[Entry]:
        return islice(self._shared, self._count)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Arrivals | tuple):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class Failed:
    """The latest failure of a client's work in the exchange under way. Fields as in `events.WorkFailed`."""

    why: str = ""
    cause: str = ""
    not_finite: bool = False
    repeats: bool = False
    times: int = 1
    """How often it has failed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused update of the exchange under way."""

    fault: Fault
    why: str


class BufferedUpdate(NamedTuple):
    """An admitted update in a buffer."""

    client: str
    version: int
    """The model that it began from."""
    digest: bytes


@dataclass(frozen=True, slots=True)
class Work:
    """What a client of a run with a buffer has to do."""

    version: int
    """The model that it begins from, which is the number of the round in which it was drawn."""
    attempt: int
    """The draw of that round, whose deadline it has."""
    late: bool = False
    """Whether that deadline has passed."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A lost client state that is still in the server's sum."""

    why: str
    left_out: bool
    """Whether its client takes no part after the restart of the states either."""


class ByClient(dict[str, T]):
    """A dictionary by client id that is part of a state: it is never changed."""

    def __hash__(self) -> int:  # type: ignore[override]  # equal ones have the same clients
        return hash(frozenset(self))

    def added(self, client: str, value: T) -> Self:
        """These, and this value of a client; it comes last."""
        return type(self)({**self.without({client}), client: value})

    def without(self, clients: AbstractSet[str]) -> Self:
        """These but for some clients."""
        if clients.isdisjoint(self):
            return self
        return type(self)({client: value for client, value in self.items() if client not in clients})
