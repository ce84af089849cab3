"""Limits of the values of a run, and values of any shape (a task's options, a method's parameters) read with limits.

A list of runs shows all runs in one message, so one run may not bring much; deeper or larger values are refused before
anything is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from google.protobuf.struct_pb2 import Struct, Value
from pydantic import AfterValidator, Field

MAX_COUNT = 2**32 - 1
"""Largest number of rounds, clients, steps or examples in a batch: what RunSpec's fields hold."""
MAX_EXAMPLES = 2**53
"""Largest number of examples: beyond it a float64, by which clients are weighted, does not hold every whole number."""
MAX_SECONDS = 1_000_000_000
"""Longest time, some 31 years: timers and the wire's durations hold it."""
MAX_NUMBER = 3e38
"""Largest learning rate, decay or norm: a float32 on a device holds it."""

MAX_SPEC_BYTES = 64 << 10
"""Largest RunSpec: it is in the ledger, in memory and in every list of runs."""
MAX_DEPTH = 16
"""Tables and lists within each other."""
MAX_VALUES = 4096
"""Names and values of a table of options in all."""
MAX_TEXT = 16 << 10
"""Characters of names and texts among the options in all."""
MAX_LABELS = 256
"""By which a run chooses clients."""
MAX_CHARS = 256
"""Of a name."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected text on one line without control characters")
    return text


def _no_longer(text: str) -> str:
    if len(text) > MAX_CHARS:
        raise ValueError(f"expected at most {MAX_CHARS} characters")
    return text


Word = Annotated[str, AfterValidator(_printable), AfterValidator(_no_longer)]
"""A name, which people will see in logs and tables."""
FileName = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
"""A path, as long as one may be."""


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


def _leaves(values: Any) -> Iterator[tuple[int, Any]]:
    """Every name and value with its depth, without a stack of calls whose height the values decide."""
    waiting = [(0, values)]
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(depth + 1, each) for pair in value.items() for each in pair]
        elif isinstance(value, list | tuple):
            waiting += [(depth + 1, each) for each in value]
        if not isinstance(value, Mapping | list | tuple) or depth > MAX_DEPTH:
            yield depth, value


def plain(struct: Struct) -> dict[str, Any]:
    """A Struct of the wire as Python values, whatever they are: `MessageToDict` raises for what is not finite."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return plain(value.struct_value)
    if kind == "list_value":
        return [_plain(each) for each in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)
