"""What goes wrong on the way to a daemon that is set up."""

from __future__ import annotations


class Misused(Exception):
    """A command was asked for something that it cannot do; the message says what was expected, and what to do."""
