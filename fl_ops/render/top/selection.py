"""What the keys of `fl top` do: which list is walked, which line is chosen, whether its details are open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

List = Literal["runs", "clients"]
HELP = "↑↓ move  tab other list  enter details  esc back  q leave"


@dataclass(frozen=True)
class Selection:
    """The chosen line, by name: it stays chosen when the list changes."""

    list: List = "runs"
    name: str = ""
    open: bool = False
    left: bool = False
    """Whether the view was left."""

    def at(self, names: Sequence[str]) -> int:
        """The index of the chosen line; the first one if it is not there any more."""
        return names.index(self.name) if self.name in names else 0

    def fitting(self, names: Sequence[str]) -> Selection:
        """The same with a line that is there."""
        return replace(self, name=names[self.at(names)] if names else "", open=self.open and bool(names))

    def after(self, key: str, names: Sequence[str], page: int) -> Selection:
        """The selection after a key. names: of the walked list; page: lines that a page key moves."""
        at = self.at(names)
        moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -len(names), "end": len(names)}
        if key == "q":
            return replace(self, left=True)
        if key in moves and names:
            return replace(self, name=names[max(0, min(len(names) - 1, at + moves[key]))])
        if key == "tab":
            return Selection("clients" if self.list == "runs" else "runs")
        if key == "enter" and names:
            return replace(self, name=names[at], open=True)
        return replace(self, open=False) if key == "esc" else self


_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end",
    "\t": "tab", "\r": "enter", "\n": "enter", "\x1b": "esc", "\x7f": "esc", "q": "q", "Q": "q",
}  # fmt: skip


def keys(typed: str) -> list[str]:
    """The names of the keys in what a terminal sent; unknown ones are left out."""
    found, rest = [], typed
    while rest:
        known = max((code for code in _KEYS if rest.startswith(code)), key=len, default="")
        if known == "\x1b" and len(rest) > 1 and rest[1] in "[O":
            known, name = rest, ""  # an escape sequence of another key
        else:
            name = _KEYS.get(known, "")
        found += [name] if name else []
        rest = rest[max(1, len(known)) :]
    return found
