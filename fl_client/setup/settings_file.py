"""client.toml as text: every key with its description, and the keys without a chosen value as comments."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import tempfile
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fl_client.errors import ConfigError, StartError, UsageError
from fl_client.policy.config import NO_POLICY, Policy, read_policy
from fl_client.settings.config import ClientConfig, load_config
from fl_client.storage.disk import write_whole

_HEAD = """# Settings of a daemon, made by `fl-client init`. A key after a # has its default value.
# `fl-client doctor` checks whether a daemon can work with these settings.
"""
_WIDTH = 118

ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="The daemon's settings.")]
"""The option of the commands that read a daemon's settings."""


def read(config: Path) -> tuple[ClientConfig, Policy]:
    """A daemon's settings, and its site's policy. Raises UsageError."""
    try:
        settings = load_config(config)
        return settings, NO_POLICY if settings.policy is None else read_policy(settings.policy)
    except StartError as error:
        raise UsageError(str(error)) from None


def settings_text(values: Mapping[str, Any]) -> str:
    """The file for these values, by key. A section is a mapping."""
    sections = {name: section for name, field in ClientConfig.model_fields.items() if (section := _section(field))}
    parts = [_HEAD, _keys(ClientConfig, values, skip=sections)]
    for name, section in sections.items():
        chosen = values.get(name)
        description = _comment(inspect.cleandoc(section.__doc__ or ""))
        header = f"[[{name}]]" if _repeated(ClientConfig.model_fields[name]) else f"[{name}]"
        header = header if chosen else f"# {header}"
        parts.append(f"{description}{header}\n{_keys(section, chosen or {})}")
    return "\n".join(parts)


def check_text(path: Path, text: str) -> None:
    """Raises UsageError if the daemon's own reader refuses the text. path: of the file, for the message."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            copy.write_text(text, encoding="utf-8")
            load_config(copy)
    except ConfigError as error:
        raise UsageError(str(error).replace(str(copy), str(path))) from None


def save(path: Path, text: str) -> None:
    """Write the text atomically, after the daemon's own reader has accepted it.

    Raises:
        UsageError: the reader refuses it, or the file cannot be written.
    """
    check_text(path, text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [text.encode()])
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; use sudo, or another --config") from None


@functools.cache
def attribute_docstrings(owner: type) -> Mapping[str, str]:
    """The docstrings of a class's attributes by the attribute's name, each on one line."""
    (definition,) = ast.parse(inspect.getsource(owner)).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    docstrings = {}
    for before, after in pairwise(body):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            docstrings[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return docstrings


def _keys(model: type[BaseModel], values: Mapping[str, Any], skip: Mapping[str, Any] | None = None) -> str:
    descriptions = {**_MORE, **attribute_docstrings(model)}
    lines = []
    for name, field in model.model_fields.items():
        if name in (skip or {}):
            continue
        chosen = name in values
        value = values[name] if chosen else _default(field)
        setting = f"{name} = {toml(value)}".rstrip()
        lines.append(_comment(descriptions.get(name, "")) + (setting if chosen else f"# {setting}"))
    return "\n".join([*lines, ""])


def toml(value: object) -> str:
    """A value in TOML. Empty for None, which TOML does not have."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {toml(member)}" for name, member in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(member) for member in value)}]"
    return _json(str(value) if isinstance(value, Path) else value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _json(name)


def _json(value: object) -> str:
    """A value in JSON, which is TOML too, except for the character DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _default(field: FieldInfo) -> object:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return default.model_dump() if isinstance(default, BaseModel) else default


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, _WIDTH))


def _repeated(field: FieldInfo) -> bool:
    """Whether a section is a list of tables, of which the file shows the keys once."""
    return get_origin(field.annotation) is list


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)


_MORE = {"log": '"json": one object a line; "pretty": for people; "auto": pretty on a terminal, JSON elsewhere.'}
"""Descriptions of keys without a docstring."""
