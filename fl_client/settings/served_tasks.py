"""The settings of what a daemon trains: its task or tasks, and the data of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from fl_common.names import check_id
from fl_common.settings import Section
from fl_extensions.naming import is_path


def _code_path(value: str) -> str:
    if not is_path(value):
        raise ValueError(f"expected module:attribute of an installed module, such as my_data:mine, got {value!r}")
    return value


CodePath = Annotated[str, AfterValidator(_code_path)]
"""Code of an installed module, as module:attribute."""


class TaskConfig(Section):
    """The task that is trained."""

    name: str
    """Name of a built-in task, or module:attribute of an installed module."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options for the task: {data_root = "..."}."""


class ShardConfig(Section):
    """This device's part of the training data, by one of the ways below. Without any of them: all data."""

    partition: dict[str, str | bool | int | float] | None = None
    """A partition made from a seed, by the keys below. Devices differ only in `index`."""
    file: Path | None = None
    """A partition file."""
    index: int | None = Field(default=None, ge=0)
    """Number of the client in the partition, from 0."""
    indices: Path | None = None
    """A file with the numbers of this device's examples in the training set: one a line, or .npy."""
    folder: Path | None = None
    """A folder of the device's own files, which the task reads."""
    query: CodePath | None = None
    """module:function, called without arguments at each start. It returns indices, a folder (a pathlib.Path), or
    rows, which the task reads as shard.rows."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        names = ("partition", "file", "indices", "folder", "query")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"expected one of {', '.join(names[:-1])} and {names[-1]}, got {' and '.join(given)}")
        if given in (["partition"], ["file"]) and self.index is None:
            raise ValueError(f"{given[0]} needs an index: the number of this device's part, from 0")
        if self.index is not None and given not in (["partition"], ["file"]):
            raise ValueError("index needs a partition or a file")
        return self


def _data_name(value: str) -> str:
    return check_id("data", value) if value else ""


class ServedTask(Section):
    """One of several tasks that a daemon serves, with data of its own. They stand in tables [[tasks]]."""

    name: str
    """Name of a built-in task, or module:attribute of an installed module."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options for the task: {data_root = "..."}."""
    data: Annotated[str, AfterValidator(_data_name)] = ""
    """Name of the data. Tasks of one name need different ones. Data of one name has one privacy account, which counts
    what all its tasks tell."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of this data, beside those of the device."""
    package: Annotated[str, AfterValidator(_data_name)] = ""
    """Name of the package from the coordinator that has the task's code. Empty: it is installed on the device."""
    shard: ShardConfig = ShardConfig()
    """The data, as in [shard]."""

    @property
    def title(self) -> str:
        """Task and data for messages, and for the name of a file."""
        return f"{self.name}@{self.data}" if self.data else self.name


def check_apart(one: ServedTask, other: ServedTask) -> None:
    """Raises ValueError for two tasks that cannot be told apart, or the same data under two names."""
    if one.title == other.title:
        raise ValueError(f"tasks: expected another `data` for each task {one.name!r}, got {one.data!r} twice")
    same_shard = one.shard == other.shard and (one.name, one.options) == (other.name, other.options)
    same_folder = one.shard.folder is not None and one.shard.folder == other.shard.folder
    if one.data != other.data and (same_shard or same_folder):
        raise ValueError(
            f"tasks: expected one name for the same data, got {other.data!r} and {one.data!r}: its privacy account"
            " counts what all its tasks tell"
        )
