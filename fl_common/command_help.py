"""The command lines of our programs: options in groups, switches without a type, and examples at the end of a help."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import Parameter
from typing import Any, get_type_hints

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose help shows no <bool> after a switch, where none is typed; its errors are in plain words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, switches without a type."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left. Raises BadParameter, in plain words, for a value that does not fit."""
        with _plain_errors():
            return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A group of commands, as `Command`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, switches without a type."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left, as `Command` has them."""
        with _plain_errors():
            return super().parse_args(ctx, args)


class FlagGroup:
    """Base of a dataclass whose fields are options of a command, annotated as a command's parameters are."""

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """An option for each field."""
        hints = get_type_hints(cls, include_extras=True)
        options = inspect.signature(cls).parameters.values()
        return [option.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[option.name]) for option in options]

    @classmethod
    def taken_from(cls, values: dict[str, Any]) -> Any:
        """The group of these fields, which are removed from the values of a command line."""
        return cls(**{field.name: values.pop(field.name) for field in fields(cls)})  # type: ignore[arg-type]


def with_groups(function: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, in which each parameter that is an `FlagGroup` stands for the group's options."""
    parameters = inspect.signature(function, eval_str=True).parameters
    groups = {name: parameter.annotation for name, parameter in parameters.items() if _is_group(parameter.annotation)}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        made = {name: group.taken_from(values) for name, group in groups.items()}
        function(**made, **values)

    set_parameters(run, [option for parameter in parameters.values() for option in _options_of(parameter)])
    return run


def set_parameters(function: Callable[..., None], parameters: list[Parameter]) -> None:
    """Let typer build the command line from these parameters: it reads both attributes."""
    vars(function)["__signature__"] = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def examples(*lines: str) -> dict[str, Any]:
    """Arguments of `typer.Typer.command`: the class above, and these command lines at the end of the help."""
    heading = "Example:" if len(lines) == 1 else "Examples:"
    return {"cls": Command, "epilog": "\n\n".join((heading, *lines))}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """The words of our settings in place of pydantic's, such as "Value error, 'x' is not one of 'a', 'b'"."""
    try:
        yield
    except BadParameter as error:
        from pydantic import ValidationError  # noqa: PLC0415 - slow to import, and a help needs none of it

        from fl_common.settings import expected_value, shown  # noqa: PLC0415 - the same

        if isinstance(error.__cause__, ValidationError):
            detail = error.__cause__.errors()[0]
            expected = expected_value(detail)
            of_python = detail["type"] == "value_error"  # such a message says already what came
            error.message = expected if of_python else f"expected {expected}, got {shown(detail['input'])}"
        raise


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, FlagGroup)


def _options_of(parameter: Parameter) -> list[Parameter]:
    if _is_group(parameter.annotation):
        group: type[FlagGroup] = parameter.annotation
        return group.parameters()
    return [parameter.replace(kind=Parameter.KEYWORD_ONLY)]


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
