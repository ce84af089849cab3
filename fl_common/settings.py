"""Settings files: TOML, checked by pydantic, with error messages for people.

Several files may be merged: the keys of a later file replace those of an earlier one, table by table, and the result is
checked as a whole. So many machines can share one file, and a secret or a device's own settings have their own file.

Relative paths in a settings file are relative to the working directory of the program.
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic_core import ErrorDetails


class SettingsError(ValueError):
    """A settings file cannot be used. The message names the file, the key, the expected and the actual value."""


class Section(BaseModel):
    """A section of settings: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Settings = TypeVar("Settings", bound=Section)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[::1]:port". Raises ValueError for anything else."""
    if "://" in address:
        raise ValueError(f"expected host:port, got {address!r}: leave out the scheme")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'expected host:port with a port up to 65535, such as "127.0.0.1:7070", got {address!r}')
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether the host is "localhost" or a loopback address. Other names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(value: str) -> str:
    split_address(value)
    return value


Address = Annotated[str, AfterValidator(_address)]
"""host:port."""


def read_settings(path: Path, kind: type[Settings], overrides: Sequence[Path] = ()) -> Settings:
    """Read a settings file, merge the overrides into it in order, and check the result.

    Raises:
        SettingsError: a file cannot be read, or a value is wrong. The message names the file with the wrong value.
    """
    files = {file: _read(file) for file in (path, *overrides)}
    try:
        return validated(functools.reduce(_merged, files.values()), kind)
    except ValidationError as error:
        for file, values in files.items():
            if other := other_kind(values, kind.model_fields):
                raise SettingsError(f"{file}: {other}") from None
        messages: dict[Path, list[str]] = {}
        for detail in error.errors():
            messages.setdefault(_file_of(detail["loc"], files), []).append(describe_error(detail, kind))
        raise SettingsError("; ".join(f"{file}: {'; '.join(texts)}" for file, texts in messages.items())) from None
    except ValueError as error:
        raise SettingsError(f"{', '.join(map(str, files))}: {error}") from None


_FILES = {
    **dict.fromkeys(("client_id", "shard", "standbys"), "settings of a daemon, for `fl-client --config`"),
    **dict.fromkeys(("listen", "admin_listen"), "settings of a coordinator, for `fl-server --config`"),
    **dict.fromkeys(("algorithm", "round", "stop"), "a run, for `fl run create`"),
}
"""Key that only one kind of file has -> that kind. The first one in a file decides."""


def other_kind(values: Mapping[str, Any], known: Collection[str]) -> str:
    """What a file is in place of the expected one, by a key that only the other kind has; "" if it has none."""
    present = [key for key in _FILES if key in values]
    if not present or any(key in known for key in present):
        return ""
    return f"this file is {_FILES[present[0]]}: it has the key {present[0]!r}"


_NESTED = "its values are nested too deeply"


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some editors write it before UTF-8. It is accepted in every file that a person writes."""


def parse_toml(content: bytes) -> dict[str, Any]:
    """The table of a TOML file's content. Raises ValueError, where the standard library raises RecursionError too."""
    try:
        return tomllib.loads(content.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError:
        raise ValueError("expected UTF-8, got another encoding: save it as UTF-8 in the editor") from None
    except RecursionError:
        raise ValueError(_NESTED) from None


def validated(values: Mapping[str, Any], kind: type[Settings]) -> Settings:
    """A section from the values of a TOML table, each of exactly its type: "yes" is not true, and true is not 1.

    Raises ValidationError, and ValueError for a date or time.
    """
    # As JSON, because pydantic's strict mode takes text as a path, and a list as a tuple, only there.
    return kind.model_validate_json(json.dumps(values, default=_no_json), strict=True)


def _no_json(value: object) -> object:
    """Refuse a date or time of TOML: no setting has one, and a task's option would get another value."""
    raise ValueError(f'expected text in quotes in place of a date or time: "{value}", got {value}')


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, where the standard library raises RecursionError too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_NESTED) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_bytes())
    except FileNotFoundError:
        raise SettingsError(f"{path}: expected a settings file there, found none") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: is not TOML: {error}") from None


def _merged(below: Any, above: Any) -> Any:
    """Tables are merged key by key; any other value of `above` replaces that of `below`."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


def _file_of(where: Sequence[int | str], files: Mapping[Path, dict[str, Any]]) -> Path:
    """The last file that has the key; the first file if none has any part of it."""
    depths = {file: _depth(where, values) for file, values in files.items()}
    deepest = max(depths.values())
    return next(file for file in (reversed(depths) if deepest else depths) if depths[file] == deepest)


def _depth(where: Sequence[int | str], values: Any) -> int:
    for depth, part in enumerate(where):
        if not isinstance(values, dict) or part not in values:
            return depth
        values = values[part]
    return len(where)


def describe_error(detail: ErrorDetails, kind: type[BaseModel]) -> str:
    """One error of pydantic as "key: expected ..., got ..."."""
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown key{_suggestion(detail, kind)}"
    if detail["type"] == "missing":
        return f"{where}: expected a value, found none"
    if detail["type"] == "value_error":
        text = str(detail["ctx"]["error"])
        return f"{where}: {text}" if where else text
    value = detail["input"]
    got = f"a value of type {type(value).__name__}" if _is_secret(detail["loc"], kind) else shown(value)
    return f"{where}: expected {expected_value(detail)}, got {got}"


def describe_json_error(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first error of a value that came as JSON, likewise."""
    detail = error.errors()[0]
    return (
        f"expected JSON: {detail['ctx']['error']}" if detail["type"] == "json_invalid" else describe_error(detail, kind)
    )


_SHOWN_CHARS = 300


def shown(value: object) -> str:
    """A value of any kind in an error message, cut."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


_EXPECTED = {
    "bool": "true or false",
    "date": "a date",
    "datetime": "a date and a time",
    "dict": "a table",
    "finite": "a finite number",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "a table",
    "path": "a path",
    "string": "text",
    "tuple": "a list",
}
"""First word of pydantic's type of an error -> what was expected, in the words of TOML."""


def expected_value(detail: ErrorDetails) -> str:
    """What an error of pydantic expected, in plain words: a whole number, text, 'a' or 'b'."""
    kind = detail["type"]
    if kind in {"string_too_short", "string_too_long", "too_short", "too_long"}:
        of, items = ("text of ", "characters") if kind.startswith("string") else ("", "entries")
        bound = "at least" if kind.endswith("short") else "at most"
        limit = next(value for name, value in detail["ctx"].items() if name in {"min_length", "max_length"})
        return f"{of}{bound} {limit} {items}"
    if kind.endswith(("_type", "_parsing", "_number", "_from_float")):
        return _EXPECTED.get(kind.partition("_")[0], detail["msg"])
    text = detail["msg"]
    for words in ("Value error, ", "Input should be ", "Value should be ", "expected "):
        text = text.removeprefix(words)
    return text


def _is_secret(where: Sequence[int | str], kind: type[BaseModel]) -> bool:
    """Whether a value, even a wrong one, must not be shown."""
    section: Any = kind
    for part in where:
        fields = section.model_fields if _is_section(section) else {}
        if str(part) not in fields:
            continue
        parts = list(_parts(fields[str(part)].annotation))
        if SecretStr in parts:
            return True
        section = next((part for part in parts if _is_section(part)), section)
    return False


def _parts(annotation: Any) -> Iterator[Any]:
    """A type and the types that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _suggestion(detail: ErrorDetails, kind: type[BaseModel]) -> str:
    """The known key most similar to an unknown one, or all keys of the section."""
    section = kind
    for part in detail["loc"][:-1]:
        if str(part) not in section.model_fields:
            continue  # an index of a list, or a name in a table of sections
        annotation = section.model_fields[str(part)].annotation
        section = next(part for part in (annotation, *get_args(annotation)) if _is_section(part))
    known = list(section.model_fields)
    near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
    return f", did you mean {near[0]}?" if near else f", expected one of {', '.join(known)}"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
