"""The settings of the code as rows of a page: names, types, ranges, defaults and meanings."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from algorithms.parameters import Range
from fl_client.setup.settings_file import attribute_docstrings
from fl_common.settings import Address

ROOT = Path(__file__).parents[2]
REQUIRED = "required"
NONE = "none"
"""A missing key has another meaning than any value."""
_WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "boolean",
    Path: "path",
    SecretStr: "text",
    dict: "table",
    list: "list",
    tuple: "list of tables",
}
_BOUNDS = {Ge: "≥ {}", Gt: "> {}", Le: "≤ {}", Lt: "< {}"}
_OF_THE_WIRE = {(1 << 32) - 1, 1 << 53, 3e38}
"""The largest numbers of the contract's types, which the page names once."""


@dataclass(frozen=True)
class Row:
    """One key."""

    name: str
    values: str
    """The allowed values, as text."""
    default: str
    meaning: str


def model_rows(model: type[BaseModel], extra: dict[str, str] | None = None) -> list[Row]:
    """Return the keys of a section without its sub-sections; `extra` has meanings that the code does not contain."""
    meanings = {**attribute_docstrings(model), **(extra or {})}
    return [
        Row(name, values_of(field), default_of(field), meanings[name])
        for name, field in model.model_fields.items()
        if section_of(field) is None
    ]


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section."""
    if get_origin(field.annotation) in (tuple, dict):
        return None
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections of a model by name."""
    found = {name: section_of(field) for name, field in model.model_fields.items()}
    return {name: section for name, section in found.items() if section is not None}


def values_of(field: FieldInfo) -> str:
    """A field's type and range in words."""
    bounds = [
        text.format(_number(getattr(limit, kind.__name__.lower())))
        for limit in field.metadata
        for kind, text in _BOUNDS.items()
        if isinstance(limit, kind) and getattr(limit, kind.__name__.lower()) not in _OF_THE_WIRE
    ]
    # pydantic moves what stands beside the outermost type into the metadata.
    address = any(mark in field.metadata for mark in get_args(Address)[1:])
    return " ".join(["host:port" if address else in_words(field.annotation), ", ".join(bounds)]).rstrip()


def _number(limit: float) -> str:
    return "2^64" if limit == 1 << 64 else f"{limit:,}"


def in_words(kind: Any) -> str:
    """Return a type in the words of TOML."""
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not types.NoneType]
    if origin is Annotated:
        if kind == Address:
            return "host:port"
        limits = [str(part) for part in parts[1:] if isinstance(part, Range)]
        return " ".join([in_words(parts[0]), *limits])
    if origin is Literal:
        return ", ".join(f'"{part}"' for part in parts)
    if origin in (Union, types.UnionType):
        return in_words(parts[0]) if len(parts) == 1 else " or ".join(in_words(part) for part in parts)
    if origin is tuple and not inspect.isclass(parts[0]):
        return f"list of {in_words(parts[0])}s"
    return _WORDS[origin or kind]


def default_of(field: FieldInfo) -> str:
    """Return a field's default as in the file; `none` if a missing key has another meaning than any value."""
    if field.is_required():
        return REQUIRED
    default = field.default if field.default is not PydanticUndefined else field.default_factory()  # type: ignore[misc, call-arg] # none of ours takes arguments
    return shown(default)


def shown(value: Any) -> str:
    """A value as TOML has it."""
    if value is None or value in ({}, ()):
        return NONE
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str | Path) else f"`{value}`"


def message_comments(message: str, file: str = "admin") -> dict[str, str]:
    """The comments of a message of a .proto file, by the field's name, each on one line."""
    text = (ROOT / "protos" / "fl" / "v1" / f"{file}.proto").read_text(encoding="utf-8")
    body = re.search(rf"^message {message} {{\n(.*?)^}}", text, re.DOTALL | re.MULTILINE)
    if body is None:
        raise LookupError(f"expected a message {message} in {file}.proto, found none")
    return dict(_commented(body[1]))


def _commented(body: str) -> Iterator[tuple[str, str]]:
    words: list[str] = []
    for line in map(str.strip, body.splitlines()):
        if line.startswith("//"):
            words.append(line.removeprefix("//").strip())
        elif field := re.fullmatch(r"(?:optional )?\S+(?: \S+)? (\w+) = \d+;", line):
            yield field[1], " ".join(words)
            words = []


def signature_rows(function: Any, meanings: dict[str, str]) -> list[Row]:
    """Return the parameters of a builder as keys. Raises LookupError for a parameter without a meaning."""
    parameters = inspect.signature(function, eval_str=True).parameters
    if unexplained := sorted(parameters.keys() - meanings.keys()):
        raise LookupError(
            f"expected a meaning for {', '.join(unexplained)} in docs/source/configuration.py, found none"
        )
    return [
        Row(name, in_words(parameter.annotation), shown(parameter.default), meanings[name])
        for name, parameter in parameters.items()
    ]


def table(rows: list[Row]) -> str:
    """Rows as a Markdown list, so that a meaning has the whole width. A key without a default shows none."""
    return "\n".join(f"- `{row.name}` ({_shape(row)}): {row.meaning}" for row in rows)


def _shape(row: Row) -> str:
    return row.values + (f", {row.default}" if row.default != NONE else "")
