"""Reads a run's configuration from plain values, from the ledger and from the wire, and writes it to the wire.

All conversions are generic: the field names are those of RunSpec, so a new field needs no code here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Struct, Value
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fl_common.settings import expected_value
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from protos.fl.v1 import admin_pb2

MAX_SPEC_BYTES = 64 << 10
"""Largest RunSpec, which is in the ledger, in memory and in every list of runs."""


def from_values(values: dict[str, Any]) -> RunConfig:
    """Check plain values, as a TOML file or the ledger has them. Raises InvalidInput for the first wrong field."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        refused = _refused(error)
    # Raised outside the except block, where pydantic's error would be its context: the garbage collector does not see
    # what that error holds, so the request would stay in memory.
    raise refused


def _refused(error: ValidationError) -> InvalidInput:
    """The first wrong field."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "run"
    return InvalidInput(field, _expected(first), _shown(first["input"]))


def from_stored(spec: object) -> RunConfig:
    """Ledger row to configuration. Raises InvalidInput, also for a row that is no JSON object."""
    if not isinstance(spec, Mapping):
        raise InvalidInput("spec", "a JSON object in the run's row of the ledger", _shown(spec))
    return from_values(dict(spec))


def _expected(error: ErrorDetails) -> str:
    """What was expected, in plain words."""
    if error["type"] == "extra_forbidden":
        return "no field of this name"
    if error["type"] == "missing":
        return "a value"
    return expected_value(error)


def _shown(value: object) -> str:
    """A value in an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


_ANY_SHAPE = (
    ("task", "options"),
    ("algorithm", "parameters"),
    ("local", "optimizer", "parameters"),
    ("round", "reducer_parameters"),
)
"""Fields of RunSpec with values of any shape: the sections, and the name."""


def from_spec(spec: admin_pb2.RunSpec) -> RunConfig:
    """Wire to configuration. Raises InvalidInput."""
    if spec.ByteSize() > MAX_SPEC_BYTES:
        raise InvalidInput("spec", f"at most {MAX_SPEC_BYTES:,} bytes", f"{spec.ByteSize():,}")
    # Values of any shape are read with limits, by `plain`. The rest is only as deep as its schema.
    bare = admin_pb2.RunSpec()
    bare.CopyFrom(spec)
    structs: dict[tuple[str, ...], Any] = {path: reduce(getattr, path, spec) for path in _ANY_SHAPE}
    given = {path: struct for path, struct in structs.items() if struct.fields}
    for *sections, field in given:
        section: Any = reduce(getattr, sections, bare)
        section.ClearField(field)
    values = MessageToDict(bare, preserving_proto_field_name=True)
    for (*sections, field), struct in given.items():
        table = values
        for name in sections:
            table = table.setdefault(name, {})
        table[field] = plain(struct)
    return from_values(values)


def to_spec(config: RunConfig) -> admin_pb2.RunSpec:
    """Configuration to wire, with every default filled in."""
    return ParseDict(config.model_dump(exclude_none=True), admin_pb2.RunSpec())


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
