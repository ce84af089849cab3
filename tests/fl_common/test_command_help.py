"""Groups of options of a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from fl_common.command_help import FlagGroup, with_groups


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
