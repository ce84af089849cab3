"""Pages of lists: bounded in entries and bytes, and continued by a token, as in https://google.aip.dev/158.

A token names the last entry of its page by its key, not by its number in the list, so that entries which come or go in
between move no other entry.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from fl_server.errors import InvalidInput
from protos.wire import MAX_MESSAGE_BYTES

MOST_ENTRIES = 1000
"""Most entries of a page."""
ENTRIES_AT_ONCE = 250
"""Entries that are read and made into messages before the event loop has its turn."""
PAGE_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Most bytes of a page's entries, but a page has at least one. Callers accept no message over MAX_MESSAGE_BYTES."""
_MOST_CHARS = 4096
_LARGEST = 2**53
_ENTRY_BYTES = 6
"""Tag and length of an entry in its list."""

Position = tuple[Any, ...]
"""The key of an entry: texts and integers."""
M = TypeVar("M", bound=Message)
Entries = Sequence[tuple[Position, M]]


class PagedRequest(Protocol):
    """The fields of a request for a list."""

    @property
    def page_size(self) -> int: ...  # noqa: D102 - admin.proto describes it
    @property
    def page_token(self) -> str: ...  # noqa: D102 - admin.proto describes it


@dataclass(frozen=True, slots=True)
class Page(Generic[M]):
    """The entries of a page."""

    entries: list[M]
    next_token: str
    """Empty after the last page."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a page begins."""

    of: Sequence[object]
    """The list and its filters, which must be the same in all calls."""
    size: int
    """Most entries."""
    after: Position | None
    """The last entry of the page before; None for the first page."""

    @classmethod
    def of_request(cls, request: PagedRequest, kinds: Sequence[type], *of: object) -> Cursor:
        """The cursor of a request. kinds: types of the position's parts. Raises InvalidInput for an invalid token."""
        after = _position(request.page_token, kinds, of) if request.page_token else None
        return cls(of, min(request.page_size or MOST_ENTRIES, MOST_ENTRIES), after)

    async def page(self, read: Callable[[Position | None, int], Awaitable[Entries[M]]]) -> Page[M]:
        """Fill the page. read(after, count): at most `count` entries after a position, in order; fewer at the end."""
        messages: list[M] = []
        size, last = 0, self.after
        while True:
            # One more than fits shows whether there is another page.
            count = min(ENTRIES_AT_ONCE, self.size + 1 - len(messages))
            entries = await read(last, count)
            for position, message in entries:
                size += message.ByteSize() + _ENTRY_BYTES
                if messages and (size > PAGE_BYTES or len(messages) == self.size):
                    return self._full(messages, last)
                messages.append(message)
                last = position
            if len(entries) < count:
                return Page(messages, "")

    def _full(self, messages: list[M], last: Position | None) -> Page[M]:
        """A page that another one follows."""
        content = json.dumps([_digest(self.of), last], separators=(",", ":"))
        return Page(messages, base64.urlsafe_b64encode(content.encode()).decode())


def _digest(of: Sequence[object]) -> int:
    """Tells lists and filters apart; an accident is harmless."""
    return binascii.crc32(json.dumps(of, sort_keys=True).encode())


def _usable(part: object) -> bool:
    """Whether a ledger can compare a part of a position."""
    return part.isprintable() if isinstance(part, str) else isinstance(part, int | float) and 0 <= part < _LARGEST


def _position(token: str, kinds: Sequence[type], of: Sequence[object]) -> Position:
    try:
        digest, position = json.loads(base64.b64decode(token[:_MOST_CHARS], altchars=b"-_", validate=True))
        if digest == _digest(of) and [type(part) for part in position] == list(kinds) and all(map(_usable, position)):
            return tuple(position)
    except (ValueError, TypeError, RecursionError):
        pass
    raise InvalidInput("page_token", "the next_page_token of a reply to the same request, or nothing", token[:100])
