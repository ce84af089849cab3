"""The unfinished uploads of each client in the spool, with a limit on their number and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """The name of an upload."""

    @property
    def client_id(self) -> str:
        """Owner of the upload."""
        ...


K = TypeVar("K", bound=Named)


@dataclass(frozen=True, slots=True)
class UnfinishedLimit:
    """Unfinished uploads that one client may have."""

    files: int = 4
    bytes: int = 4096 << 20
    """A single upload may be larger."""


class UnfinishedUploads(Generic[K]):
    """Unfinished uploads by client, oldest first. Not thread-safe: the spool's lock guards it.

    A sealed or discarded upload stays until its client begins the next one, or its round is over.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, dict[K, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sizes.values()))

    def add(self, key: K, size: int) -> None:
        """An upload begins or continues."""
        self._sizes.setdefault(key.client_id, {})[key] = size

    def of(self, client_id: str) -> list[K]:
        """The uploads of a client."""
        return list(self._sizes.get(client_id, ()))

    def drop(self, keys: Iterable[K]) -> None:
        """Remove these uploads."""
        for key in list(keys):
            sizes = self._sizes.get(key.client_id, {})
            sizes.pop(key, None)
            if not sizes:
                self._sizes.pop(key.client_id, None)

    def drop_where(self, over: Callable[[K], bool]) -> None:
        """Remove all uploads for which `over` is true."""
        self.drop([key for sizes in self._sizes.values() for key in sizes if over(key)])

    def excess(self, key: K, size: int, limit: UnfinishedLimit) -> list[K]:
        """The client's other uploads, oldest first, if they and this one exceed the limit; otherwise nothing."""
        others = {each: bytes_ for each, bytes_ in self._sizes.get(key.client_id, {}).items() if each != key}
        fits = len(others) < limit.files and sum(others.values()) + size <= limit.bytes
        return [] if fits else list(others)
