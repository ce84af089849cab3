"""The command `fl`: all sub-commands in one program. A command's module is imported when it is called.

So the help, a mistyped command and the completion in a shell need no import of gRPC, pydantic or numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

import typer

from fl_common.command_help import Command, Group
from fl_common.program import version_text
from fl_ops.commands.places import COMMANDS


class _Loaded(Mapping[str, Any]):
    """The commands by their names, each loaded when it is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = COMMANDS[name].load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(Group):
    """The commands of `fl`. Only what is called is loaded: the list of commands has their names and first sentences."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, _Loaded())

    def list_commands(self, _: Any) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, _: Any, cmd_name: str) -> Any:
        """A command of this name with its help and without its function; None if there is none."""
        place = COMMANDS.get(cmd_name)
        return place and Command(cmd_name, help=place.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The name, the command itself and its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.commands[str(name)], rest


_EPILOG = (
    "Exit codes: 0 done; 1 refused or failed; 2 wrong command line, configuration or value; 3 no coordinator reached; "
    "4 not allowed; 5 no such run, client or round; 6, 7 the watched run was stopped, failed; "
    "8 time was up and work is left; 130 Ctrl-C."
    "\n\nEvery command has --json: protobuf's JSON with the fields' own names (64-bit numbers are strings), lists as "
    "arrays, a watched run as one object per line. Errors are text on stderr."
)

app = typer.Typer(
    name="fl",
    cls=Commands,
    no_args_is_help=True,
    epilog=_EPILOG,
    help="Operate a federated learning coordinator: runs, clients, models and certificates.",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

        print(version_text((PROTOCOL_MIN, PROTOCOL_MAX)))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version  # handled by its callback
