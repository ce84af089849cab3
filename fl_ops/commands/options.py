"""The options that commands share, and the conversion of errors to exit codes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fl_common.program import raised_interrupts
from fl_ops.admin import settings
from fl_ops.admin.client import AdminClient
from fl_ops.errors import Exit, OpsError, Refused, UsageError, traceback_of
from fl_ops.render import output

Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that train a run's clients. Default: the processors here, divided by runs."),
]
Engine = Annotated[
    Literal["workers", "sequential", "batched"] | None,
    typer.Option(
        help="How clients train: in worker processes, one after the other, or many in lockstep as one model. "
        "Default: workers, and batched with --device cuda."
    ),
]
CellEngine = Annotated[
    Literal["sequential", "batched"],
    typer.Option(help="How the clients of a run train: one after the other, or many in lockstep as one model."),
]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda|cuda:1", help="Device of the engine batched. Default: cpu.")
]
Strategy = Annotated[
    Literal["grouped", "unfolded", "one_by_one"] | None,
    typer.Option(help="How the engine batched computes gradients. Default: the fastest one, measured at the start."),
]
Group = Annotated[
    int | None,
    typer.Option(min=1, help="Most clients in lockstep of the engine batched. Default: as many as memory allows."),
]
Autocast = Annotated[
    Literal["bfloat16"] | None,
    typer.Option(
        help="Precision of the engine batched for products in training, by torch.autocast. Default: the model's."
    ),
]
CudaGraph = Annotated[
    bool, typer.Option("--cuda-graph", help="With --device cuda: record passes of the engine batched as graphs.")
]
Distributed = Annotated[
    bool, typer.Option("--distributed", help="Share the clients with the other processes that torchrun started.")
]
"""How simulated clients train: options of `fl simulate` and `fl compare`."""

TensorBoard = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write event files for TensorBoard, in a folder of DIR for each run."),
]
Mlflow = Annotated[
    str | None,
    typer.Option(metavar="URI", help="Log to MLflow: http://host:5000, sqlite:///file.db or a folder."),
]
"""Where runs are tracked."""

_PANEL = "Connection (also by environment variables, or in ~/.config/impetus/fl.toml)"


@dataclass(frozen=True)
class Context:
    """The values of the shared options: the output format, and the connection to the coordinator."""

    as_json: bool
    layer: settings.Layer

    def connect(self) -> AdminClient:
        """A client of the coordinator's admin port; a context manager."""
        return AdminClient(settings.load(self.layer))


def _common(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")] = False,
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
        Path | None, typer.Option(help="Your certificate. FL_CERT", metavar="FILE", rich_help_panel=_PANEL)
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Its private key. FL_KEY", metavar="FILE", rich_help_panel=_PANEL)
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A token (OIDC), in place of a certificate. FL_TOKEN_FILE; FL_TOKEN has the token itself",
            metavar="FILE",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure", help="Connect in plain text, on this machine only. FL_INSECURE=1", rich_help_panel=_PANEL
        ),
    ] = None,
    insecure_remote: Annotated[
        bool | None,
        typer.Option(
            "--insecure-remote", help="Allow plain text to other machines. FL_INSECURE_REMOTE=1", rich_help_panel=_PANEL
        ),
    ] = None,
    use_proxy: Annotated[
        bool | None,
        typer.Option(
            "--proxy/--no-proxy",
            help="Use the HTTP proxy of the environment, except to this machine. FL_USE_PROXY=0: not",
            rich_help_panel=_PANEL,
        ),
    ] = None,
) -> None:
    """The options of commands that call a coordinator, as a signature. The names are those of `settings.Layer`."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command that works on this machine: adds --json, and passes a `Context` first."""
    return _wrapped(function, (_common,))


def admin_command(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command that calls a coordinator: adds --json and connection options, passes a `Context` first."""
    return _wrapped(function, (_common, _connection))


def _wrapped(function: Callable[..., None], extra: tuple[Callable[..., None], ...]) -> Callable[..., None]:
    own = _parameters(function)[1:]
    added = [parameter for source in extra for parameter in _parameters(source)]
    layer_names = {parameter.name for parameter in _parameters(_connection)}

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        layer = {name: arguments.pop(name) for name in layer_names & arguments.keys()}
        context = Context(arguments.pop("as_json"), settings.Layer(**layer))
        _exit_on_error(functools.partial(function, context, **arguments))

    parameters = [*own, *added]
    # typer reads both attributes to build the command line.
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    signature = inspect.signature(function, eval_str=True)
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()]


def confirm(question: str, instead: str) -> None:
    """Ask on a terminal. Raises Refused after a no, and UsageError without a terminal. instead: the option for yes."""
    if not sys.stdin.isatty():
        raise UsageError(f"expected a terminal to ask on, or {instead}")
    if not typer.confirm(question, err=True):
        raise Refused("nothing was changed")


def _exit_on_error(work: Callable[[], None]) -> None:
    """Run a command. Its errors become a line on stderr and an exit code. A traceback is of foreign code only."""
    try:
        with raised_interrupts():
            work()
    except OpsError as exc:
        output.show_error(str(exc), exc.trace or traceback_of(exc))
        raise typer.Exit(exc.code) from exc
    except KeyboardInterrupt as exc:
        raise typer.Exit(Exit.INTERRUPTED) from exc
