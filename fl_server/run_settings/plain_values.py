"""Limits of a run's values, and a reader of values of any shape: a task's options, a method's parameters.

A list of runs has all runs in one message, so each run must be small. Deeper or larger values are refused before they
are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from google.protobuf.struct_pb2 import Struct, Value
from pydantic import AfterValidator, Field

from protos.run_file import MOST_WHOLE

MAX_COUNT = 2**32 - 1
"""Largest number of rounds, clients, steps or examples in a batch: the range of RunSpec's fields."""
MAX_EXAMPLES = 2**53
"""Largest number of examples: above it a float64, which is used for weights, does not hold every whole number."""
MAX_SECONDS = 1_000_000_000
"""Longest time, about 31 years, which timers and durations can represent."""
MAX_NUMBER = 3e38
"""Largest learning rate, decay or norm: a float32 on a device can represent it."""

MAX_SPEC_BYTES = 64 << 10
"""Largest RunSpec, which is in the ledger, in memory and in every list of runs."""
MAX_DEPTH = 16
"""Deepest nesting of tables and lists."""
MAX_VALUES = 4096
"""Names and values in a table of options in total."""
MAX_TEXT = 16 << 10
"""Characters of all names and texts in a table of options."""
MAX_LABELS = 256
"""Labels by which a run selects clients."""
MAX_SCHEDULES = 16
"""Parameters that change from round to round."""
MAX_PATTERNS = 64
"""Patterns of the names of personal parameters."""
MAX_CHARS = 256
"""Longest name."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected text on one line without control characters")
    return text


def _no_longer(text: str) -> str:
    if len(text) > MAX_CHARS:
        raise ValueError(f"expected at most {MAX_CHARS} characters")
    return text


Word = Annotated[str, AfterValidator(_printable), AfterValidator(_no_longer)]
"""A name that is shown in logs and tables."""
FileName = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
"""A path, up to the usual limit of operating systems."""


def check_plain(values: Any) -> None:
    """Raises ValueError for values that are too deep or too many, and for numbers that are not finite."""
    characters = 0
    for entries, (depth, value) in enumerate(_leaves(values), start=1):
        characters += len(value) if isinstance(value, str) else 0
        if depth > MAX_DEPTH:
            raise ValueError(f"expected at most {MAX_DEPTH} tables within each other")
        if entries > MAX_VALUES:
            raise ValueError(f"expected at most {MAX_VALUES} names and values")
        if characters > MAX_TEXT:
            raise ValueError(f"expected at most {MAX_TEXT:,} characters in all")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("expected finite numbers")
        if isinstance(value, int) and abs(value) > MOST_WHOLE:
            raise ValueError(f"expected whole numbers from -{MOST_WHOLE} to {MOST_WHOLE}, or larger ones as text")


def _leaves(values: Any) -> Iterator[tuple[int, Any]]:
    """Every name and value with its depth, without recursion, whose depth the values would determine."""
    waiting = [(0, values)]
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(depth + 1, part) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple):
            waiting += [(depth + 1, part) for part in value]
        if not isinstance(value, Mapping | list | tuple) or depth > MAX_DEPTH:
            yield depth, value


def plain(struct: Struct) -> dict[str, Any]:
    """A Struct as Python values, also values that are not finite, for which `MessageToDict` raises."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return plain(value.struct_value)
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)
