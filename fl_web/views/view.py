"""What a view is: a template, its parts, and the function that reads its values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from fl_web.coordinator.calls import WrongInput
from fl_web.coordinator.reader import Reader

_LONGEST = 4096
"""Characters of a value in the address: a page token of the coordinator is shorter."""

Context = dict[str, Any]


class Params:
    """The values of an address, as text. One name may have several."""

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self._values = {name: [text for text in texts if text] for name, texts in values.items()}
        for name, texts in self._values.items():
            for text in texts:
                if len(text) > _LONGEST:
                    raise WrongInput(f"{name}: expected at most {_LONGEST} characters, got {len(text)}")

    def text(self, name: str) -> str:
        """The first value; empty for none."""
        return next(iter(self._values.get(name, ())), "")

    def texts(self, name: str) -> list[str]:
        """All values, each once."""
        return list(dict.fromkeys(self._values.get(name, ())))

    def number(self, name: str) -> int:
        """A count; 0 for none. Raises WrongInput."""
        text = self.text(name)
        if not text:
            return 0
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise WrongInput(f"{name}: expected a whole number of at least 0, got {text[:40]!r}")
        return int(text)

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        """A word of a list; the first of them for none. Raises WrongInput."""
        text = self.text(name) or allowed[0]
        if text not in allowed:
            raise WrongInput(f"{name}: expected one of {', '.join(filter(None, allowed))}, got {text[:40]!r}")
        return text

    def without(self, *names: str) -> Params:
        """The same without some names."""
        return Params({name: texts for name, texts in self._values.items() if name not in names})

    def address(self, *without: str, **changed: str | int) -> str:
        """The values as the query of an address, some left out or changed; an empty value leaves one out."""
        left_out = {*without, *changed}
        pairs = [(name, text) for name, texts in self._values.items() if name not in left_out for text in texts]
        pairs += [(name, str(value)) for name, value in changed.items() if value]
        return urlencode(pairs)


@dataclass(frozen=True, slots=True)
class View:
    """A page, and what of it changes while it is open."""

    name: str
    """Also of its template, and of the folder with the templates of its parts."""
    context: Callable[[Reader, Params], Awaitable[Context]]
    """Reads the values of the templates. With `title`, and with `number`: of the history that they contain. `active` is
    false where no value changes without an event."""
    changing: Sequence[str] = ()
    """Ids of the elements of the page whose content changes: its parts."""
    watches_run: bool = False
    """Whether it shows the run that `id` names."""
    adds_entries: bool = False
    """Whether new entries of the history are added to its table one by one."""
    pause_s: float = 1.0
    """Least time between two readings of its values, however many events come: each costs the coordinator calls."""
    refresh_s: float = 0.0
    """Its values are read again after so many seconds without a change: some changes are in no watch. 0: never."""

    @property
    def template(self) -> str:
        """The template of the page."""
        return f"{self.name}.html"

    @property
    def parts(self) -> dict[str, str]:
        """Id of a part -> the template of its content."""
        return {part: f"{self.name}/_{part}.html" for part in self.changing}
