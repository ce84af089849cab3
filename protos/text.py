"""Text that somebody else wrote, made safe to print: it must not steer a terminal, hide, or pose as another line."""

from __future__ import annotations

MOST_CHARACTERS = 2000
"""Of one value in a line of the log."""


def escaped(text: str, keep: str = "") -> str:
    """The text with every character that is not printed as itself written as Python writes it.

    Those are control characters (C0, C1, DEL, ESC among them), line and paragraph separators, marks and overrides of
    the direction of writing, others without a width, and lone surrogates. keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in text)


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text itself, or its beginning and how much more there was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} characters more)"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
