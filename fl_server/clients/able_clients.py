"""The clients that are able to work for each kind of run, kept up to date client by client."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable

from fl_server.clients.draw_rules import Requirements

_Key = tuple[tuple[tuple[str, str], ...], ...]
"""Requirements that can be hashed."""

MOST_KINDS = 64
"""Different tasks and labels whose clients are kept. Those that were asked for longest ago are found again."""


class AbleClients:
    """The clients that are able to work for a task, in the order of id bytes, kept up to date client by client.

    Every run asks for them whenever some client changes. With ten thousand clients it takes a tenth of a second to
    check them all, and a microsecond to check the one that changed.
    """

    def __init__(self, present: Callable[[], tuple[str, ...]], check: Callable[[str, Requirements], bool]) -> None:
        """present: all clients that may be able, in the order of id bytes. check: whether one of them is."""
        self._present, self._check = present, check
        self._kinds: OrderedDict[_Key, _Kind] = OrderedDict()

    def changed(self, client_id: str) -> None:
        """Something about a client changed: its presence, its record, or what it reports."""
        for kind in self._kinds.values():
            kind.changed.add(client_id)

    def of(self, requires: Requirements) -> tuple[str, ...]:
        """The clients that are able now, in the order of id bytes."""
        key = tuple(tuple(sorted(pairs.items())) for pairs in requires)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind([client for client in self._present() if self._check(client, requires)])
            if len(self._kinds) > MOST_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(key)
        return kind.current(lambda client: self._check(client, requires))


class _Kind:
    """The able clients of one task and labels."""

    def __init__(self, able: list[str]) -> None:
        self.changed: set[str] = set()
        """Clients to be checked again."""
        self._able = able
        self._result: tuple[str, ...] | None = None

    def current(self, is_able: Callable[[str], bool]) -> tuple[str, ...]:
        """The able clients, after the changed ones have been checked."""
        for client in self.changed:
            self._put(client, is_able(client))
        self.changed.clear()
        if self._result is None:
            self._result = tuple(self._able)
        return self._result

    def _put(self, client: str, able: bool) -> None:
        place = bisect_left(self._able, client.encode(), key=str.encode)
        here = place < len(self._able) and self._able[place] == client
        if here == able:
            return
        self._result = None
        if able:
            self._able.insert(place, client)
        else:
            del self._able[place]
