"""The options that every command has, and what becomes of its errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_ops import output, settings
from fl_ops.admin_client import AdminClient
from fl_ops.errors import Exit, OpsError

_PANEL = "Connection (also by environment, or in ~/.config/impetus/fl.toml)"


@dataclass(frozen=True)
class Context:
    """What the common options said: where the coordinator is, and whether a program reads along."""

    as_json: bool
    layer: settings.Layer

    def connect(self) -> AdminClient:
        """A client of the coordinator; use it in a with block."""
        return AdminClient(settings.load(self.layer))


def _common(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")] = False,
) -> None:
    """The options of every command, as a signature."""


def _connection(
    server: Annotated[
        str | None,
        typer.Option(
            help=f"Admin address of the coordinator, by default {settings.DEFAULT_SERVER}. FL_ADMIN",
            metavar="HOST:PORT",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Certificate of the authority. FL_CA", metavar="FILE", rich_help_panel=_PANEL)
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(help="Your certificate, an admin's. FL_CERT", metavar="FILE", rich_help_panel=_PANEL)
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Its private key. FL_KEY", metavar="FILE", rich_help_panel=_PANEL)
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Plain text, on this machine only. FL_INSECURE=1", rich_help_panel=_PANEL),
    ] = None,
    insecure_remote: Annotated[
        bool | None,
        typer.Option(
            "--insecure-remote", help="Plain text to other machines too. FL_INSECURE_REMOTE=1", rich_help_panel=_PANEL
        ),
    ] = None,
) -> None:
    """The options of commands that call a coordinator, as a signature; the names are those of `settings.Layer`."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command that works on this machine: gets a `Context` first, and --json."""
    return _wrapped(function, (_common,))


def admin_command(function: Callable[..., None]) -> Callable[..., None]:
    """A command that calls a coordinator: gets a `Context` first, --json and the connection's options."""
    return _wrapped(function, (_common, _connection))


def _wrapped(function: Callable[..., None], extra: tuple[Callable[..., None], ...]) -> Callable[..., None]:
    own = _parameters(function)[1:]
    added = [parameter for source in extra for parameter in _parameters(source)]
    layer_names = {parameter.name for parameter in _parameters(_connection)}

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        layer = {name: arguments.pop(name) for name in layer_names & arguments.keys()}
        context = Context(arguments.pop("as_json"), settings.Layer(**layer))
        _guarded(functools.partial(function, context, **arguments))

    parameters = [*own, *added]
    # typer reads both to make the command line.
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    signature = inspect.signature(function, eval_str=True)
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()]


def _guarded(work: Callable[[], None]) -> None:
    """Runs a command; its errors become a line on stderr and an exit code, never a traceback."""
    try:
        work()
    except OpsError as exc:
        output.complain(str(exc))
        raise typer.Exit(exc.code) from exc
    except KeyboardInterrupt as exc:
        raise typer.Exit(Exit.INTERRUPTED) from exc
