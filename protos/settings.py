"""How both ends read their settings: a TOML file into a checked value, every complaint in words.

Relative paths in a settings file count from the directory in which the program is started.
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
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


def read_settings(path: Path, kind: type[Settings]) -> Settings:
    """Read and check a settings file. Raises SettingsError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: expected a settings file there, found none") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: is not TOML: {error}") from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise SettingsError(f"{path}: {'; '.join(in_words(detail, kind) for detail in error.errors())}") from None


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
