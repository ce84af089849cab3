"""Faults of connections and of messages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.chaos import links, submissions
from tests.chaos.fault import Fault

FAULTS: dict[str, Callable[[Random], Fault]] = {**links.FAULTS, **submissions.FAULTS}
