"""Which unfinished uploads each client has in the spool, so that it keeps only so many of them and so many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """What names an upload."""

    @property
    def client_id(self) -> str:
        """Whose it is."""
        ...


K = TypeVar("K", bound=Named)


@dataclass(frozen=True, slots=True)
class MostHeld:
    """What one client may keep."""

    files: int = 4
    bytes: int = 4096 << 20
    """One upload is kept whatever its size."""


class HeldParts(Generic[K]):
    """By client, in the order in which they were begun. Not thread-safe: the spool's lock guards it.

    An upload that was sealed or discarded is noticed when its client begins the next one, or when its round is over.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, dict[K, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sizes.values()))

    def begun(self, key: K, size: int) -> None:
        """An upload is begun, or goes on."""
        self._sizes.setdefault(key.client_id, {})[key] = size

    def of(self, client_id: str) -> list[K]:
        """The client's."""
        return list(self._sizes.get(client_id, ()))

    def drop(self, keys: Iterable[K]) -> None:
        """These are not there any more."""
        for key in list(keys):
            sizes = self._sizes.get(key.client_id, {})
            sizes.pop(key, None)
            if not sizes:
                self._sizes.pop(key.client_id, None)

    def drop_where(self, over: Callable[[K], bool]) -> None:
        """All of which this holds are not there any more."""
        self.drop([key for sizes in self._sizes.values() for key in sizes if over(key)])

    def too_many(self, key: K, size: int, most: MostHeld) -> list[K]:
        """The client's others, the oldest first, if there is no room for this one beside them; else nothing."""
        others = {each: bytes_ for each, bytes_ in self._sizes.get(key.client_id, {}).items() if each != key}
        fits = len(others) < most.files and sum(others.values()) + size <= most.bytes
        return [] if fits else list(others)
