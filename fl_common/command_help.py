"""The help of our commands: switches without a type, and examples at the end."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose help shows no <bool> after a switch: nobody types a value there."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, switches without a type."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands, as `Command`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, switches without a type."""
        return _without_types(super().get_params(ctx))


def examples(*lines: str) -> dict[str, Any]:
    """Arguments of `typer.Typer.command`: the class above, and these command lines at the end of the help."""
    heading = "Example:" if len(lines) == 1 else "Examples:"
    return {"cls": Command, "epilog": "\n\n".join((heading, *lines))}


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
