"""A run's configuration as rows of names and values, as its TOML file names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict

from protos.fl.v1 import admin_pb2 as pb


def configuration(spec: pb.RunSpec) -> list[tuple[str, list[tuple[str, str]]]]:
    """(section, rows) of a run's spec; rows: (name, value). Values without a section come first."""
    content = MessageToDict(spec, preserving_proto_field_name=True)
    plain = [(name, _text(value)) for name, value in content.items() if not isinstance(value, dict)]
    sections = [(name, list(_rows(value))) for name, value in content.items() if isinstance(value, dict)]
    return [("run", plain), *sections]


def _rows(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) if value else "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return str(value)
