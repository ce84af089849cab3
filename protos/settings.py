"""How both ends read their settings: TOML files into a checked value, every complaint in words.

A file may lie on top of another: its keys take the place of those below, table by table, and the whole is checked. So
what many machines share is written once, and a secret or a device's own part comes in a file of its own.

Relative paths in a settings file count from the directory in which the program is started.
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class SettingsError(ValueError):
    """A settings file that cannot be used: names file and key, what was expected, what came."""


class Section(BaseModel):
    """A frozen section that takes no unknown key."""

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
    """Whether the host is this machine by its name or number alone; names are not looked up."""
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


def read_settings(path: Path, kind: type[Settings], on_top: Sequence[Path] = ()) -> Settings:
    """Read a settings file, with others on top of it where they are named, and check what comes out.

    Raises:
        SettingsError: a file cannot be read, or a value is wrong; it is told by the file that has it.
    """
    files = {file: _read(file) for file in (path, *on_top)}
    try:
        return kind.model_validate(functools.reduce(_laid_on, files.values()))
    except ValidationError as error:
        complaints: dict[Path, list[str]] = {}
        for detail in error.errors():
            complaints.setdefault(_file_of(detail["loc"], files), []).append(in_words(detail, kind))
        raise SettingsError("; ".join(f"{file}: {'; '.join(said)}" for file, said in complaints.items())) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: expected a settings file there, found none") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: is not TOML: {error}") from None


def _laid_on(below: Any, above: Any) -> Any:
    """Tables key by key; anything else takes the place of what was there."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _laid_on(below.get(key), value) for key, value in above.items()}


def _file_of(where: Sequence[int | str], files: Mapping[Path, dict[str, Any]]) -> Path:
    """The file that has the key, the uppermost of several; the lowest, if none has anything of it."""
    depths = {file: _depth(where, values) for file, values in files.items()}
    deepest = max(depths.values())
    return next(file for file in (reversed(depths) if deepest else depths) if depths[file] == deepest)


def _depth(where: Sequence[int | str], values: Any) -> int:
    for depth, part in enumerate(where):
        if not isinstance(values, dict) or part not in values:
            return depth
        values = values[part]
    return len(where)


def in_words(detail: ErrorDetails, kind: type[BaseModel]) -> str:
    """One error of pydantic as "key: expected ..., got ..."."""
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown key{_suggestion(detail, kind)}"
    if detail["type"] == "missing":
        return f"{where}: expected a value, found none"
    if detail["type"] == "value_error":
        text = str(detail["ctx"]["error"])
        return f"{where}: {text}" if where else text
    expected = detail["msg"].removeprefix("Input should be ").removeprefix("Value should be ")
    return f"{where}: expected {expected}, got {detail['input']!r}"


def _suggestion(detail: ErrorDetails, kind: type[BaseModel]) -> str:
    """The known key nearest to an unknown one, or all of the section."""
    section = kind
    for part in detail["loc"][:-1]:
        if str(part) not in section.model_fields:
            continue  # a place in a list, or a name in a table of sections
        annotation = section.model_fields[str(part)].annotation
        section = next(each for each in (annotation, *get_args(annotation)) if _is_section(each))
    known = list(section.model_fields)
    near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
    return f", did you mean {near[0]}?" if near else f", expected one of {', '.join(known)}"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
