"""The admitted updates of an exchange in order of arrival: a value to which one more is added in constant time.

A round of four thousand clients adds four thousand updates, one by one, and asks for each whether its client has
delivered before. A tuple would be copied and searched each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Self, overload

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
        if self.has(client):
            raise ValueError(f"expected a client without an update, got {client}")
        if len(self._shared) != self._count:  # another value has grown from this one
            return type(self)((*self, (client, digest)))
        grown = copy(self)
        grown._count += 1  # noqa: SLF001 - a value of this class
        self._shared.append((client, digest))
        self._places[client] = self._count
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
