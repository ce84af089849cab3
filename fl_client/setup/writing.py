"""client.toml as text: every key with what it means, those that nobody chose as comments."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fl_client.config import ClientConfig, load_config
from fl_client.errors import ConfigError
from fl_client.files import write_whole
from fl_client.setup.errors import Misused
from fl_client.setup.explained import attribute_docstrings

_HEAD = """# Settings of a daemon, made by `fl-client init`. A key with a # in front has the value that is written
# there in any case. `fl-client doctor` looks whether a daemon can work with them.
"""
_WIDTH = 118


def settings_text(values: Mapping[str, Any]) -> str:
    """The file for these values, by key; a section is a mapping."""
    sections = {name: section for name, field in ClientConfig.model_fields.items() if (section := _section(field))}
    parts = [_HEAD, _keys(ClientConfig, values, skip=sections)]
    for name, section in sections.items():
        chosen = values.get(name)
        about = _comment(inspect.cleandoc(section.__doc__ or ""))
        header = f"[{name}]" if chosen else f"# [{name}]"
        parts.append(f"{about}{header}\n{_keys(section, chosen or {})}")
    return "\n".join(parts)


def save(path: Path, text: str) -> None:
    """Put the text at the path, whole or not at all, once the daemon's own reader has taken it.

    Raises:
        Misused: the reader says what is wrong, or the file cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            tried = Path(folder) / path.name
            tried.write_text(text, encoding="utf-8")
            load_config(tried)
    except ConfigError as error:
        raise Misused(str(error).replace(str(tried), str(path))) from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [text.encode()])
    except OSError as error:
        raise Misused(f"{path} cannot be written: {error.strerror}; use sudo, or another --config") from None


def _keys(model: type[BaseModel], values: Mapping[str, Any], skip: Mapping[str, Any] | None = None) -> str:
    told = {**_MORE, **attribute_docstrings(model)}
    lines = []
    for name, field in model.model_fields.items():
        if name in (skip or {}):
            continue
        chosen = name in values
        value = values[name] if chosen else _default(field)
        setting = f"{name} = {toml(value)}".rstrip()
        lines.append(_comment(told.get(name, "")) + (setting if chosen else f"# {setting}"))
    return "\n".join([*lines, ""])


def toml(value: object) -> str:
    """A value as TOML writes it; nothing for None, which it has no word for."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {toml(each)}" for name, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(each) for each in value)}]"
    return _json(str(value) if isinstance(value, Path) else value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _json(name)


def _json(value: object) -> str:
    """As JSON has it, which is TOML but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _default(field: FieldInfo) -> object:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return default.model_dump() if isinstance(default, BaseModel) else default


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, _WIDTH))


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)


_MORE = {"log": '"json": one object a line; "pretty": for people; "auto": pretty on a terminal, JSON elsewhere.'}
"""Of keys whose meaning their names and values say in the code."""
