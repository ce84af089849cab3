"""Groups of options of a command, and the errors of wrong values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

import typer
from typer.testing import CliRunner

from fl_common.command_help import Command, FlagGroup, Group, with_groups


@dataclass(frozen=True)
class Place(FlagGroup):
    """Two options."""

    host: Annotated[str, typer.Option(help="Where.")] = "here"
    port: Annotated[int, typer.Option(min=1)] = 80


def test_a_group_stands_for_its_options() -> None:
    """The command has an option for each field, in place, and gets the dataclass."""
    app, given = typer.Typer(add_completion=False), []

    @app.command()
    @with_groups
    def call(name: str, *, times: int = 1, place: Place) -> None:
        given.append((name, times, place))

    run = CliRunner().invoke
    assert run(app, ["a", "--port", "7"]).exit_code == 0
    assert run(app, ["b", "--host", "there", "--times", "2"]).exit_code == 0
    assert given == [("a", 1, Place("here", 7)), ("b", 2, Place("there", 80))]
    assert run(app, ["c", "--port", "0"]).exit_code == 2
    names = [option.name for option in typer.main.get_command(app).params]
    assert names == ["name", "times", "host", "port"]


class Colour(StrEnum):
    """A choice by an enumeration."""

    RED = "red"


def test_a_wrong_value_is_named_without_words_of_a_library() -> None:
    """Typer checks values by pydantic, whose messages begin with "Value error," and "Input should be"."""
    app = typer.Typer(cls=Group, add_completion=False, rich_markup_mode=None)

    @app.callback()
    def group(threads: Annotated[int, typer.Option(min=1)] = 1) -> None:
        """The group's own options are checked likewise."""

    @app.command(cls=Command)
    def call(
        kind: Literal["a", "b"] = "a", share: float = 0.5, colour: Colour = Colour.RED, at: datetime | None = None
    ) -> None:
        """Never called here."""

    wrong = {
        ("--threads", "0", "call"): "expected greater than or equal to 1, got '0'",
        ("call", "--kind", "c"): "'c' is not one of 'a', 'b'",
        ("call", "--share", "much"): "expected a number, got 'much'",
        ("call", "--colour", "blue"): "'blue' is not one of 'red'",
        ("call", "--at", "noon"): "'noon'",
    }
    for arguments, expected in wrong.items():
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, expected in result.stderr) == (2, True), result.stderr
        assert not re.search("Value error|Assertion failed|Input should be|Value should be", result.stderr)
