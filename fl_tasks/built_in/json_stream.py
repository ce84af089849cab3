"""Reads a large JSON file value by value, so that memory never holds the whole document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_CHUNK = 1 << 20
"""Characters of a read."""
_LONGEST_WORD = 5
"""Characters of false: what is left of a word or number that was cut."""
_LARGEST_VALUE = 1 << 24
"""Characters of the largest value that `value` parses as a whole."""


class JsonStream:
    """One JSON document, read from the beginning to the end.

    `keys` enters an object and `items` an array; the caller reads each value before it asks for the next one. Every
    method raises ValueError for text that is no JSON, also if it ends too early.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False

    def keys(self) -> Iterator[str]:
        """The keys of the object that begins here."""
        for _ in self._entries("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"expected a key in quotation marks, got {key!r}")
            self._take(":")
            yield key

    def items(self) -> Iterator[None]:
        """One None for each item of the array that begins here."""
        return self._entries("[", "]")

    def value(self) -> Any:
        """The next value as a whole."""
        while True:
            self._next()
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise ValueError("expected a document without deep nesting") from error
            except json.JSONDecodeError as error:
                if self._ended and error.pos >= len(self._text) - _LONGEST_WORD:
                    raise ValueError("the file ends within a value: it was cut") from error
                if self._ended or len(self._text) - self._at > _LARGEST_VALUE:
                    raise ValueError(f"expected a JSON value, got {self._shown()}") from error
            else:
                if end < len(self._text) or self._ended:  # else a number may go on
                    self._at = end
                    return value
            self._read()

    def end(self) -> None:
        """Check that nothing follows."""
        if self._next():
            raise ValueError(f"expected the end of the document, got {self._shown()}")

    def _entries(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        if self._next() != closing:
            yield
            while self._next() == ",":
                self._take(",")
                yield
        self._take(closing)

    def _take(self, character: str) -> None:
        if self._next() != character:
            raise ValueError(f"expected {character!r}, got {self._shown()}")
        self._at += 1

    def _next(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read()

    def _read(self) -> None:
        left = self._text[self._at :]
        more = self._file.read(max(_CHUNK, len(left)))
        self._text, self._at, self._ended = left + more, 0, not more

    def _shown(self) -> str:
        came = self._text[self._at : self._at + 20]
        return f"{came!r}" if came.strip() else "the end of the file"
