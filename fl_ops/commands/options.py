"""The options that commands share, in groups, and the conversion of errors to exit codes."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from google.protobuf.message import Message

from fl_common.command_help import FlagGroup, set_parameters, with_groups
from fl_common.extras import SERVER, server_packages_missing
from fl_common.program import raised_interrupts
from fl_ops.admin import settings
from fl_ops.admin.calls import Response
from fl_ops.admin.client import AdminClient
from fl_ops.errors import Exit, OpsError, Refused, UsageError, traceback_of
from fl_ops.render import output

if TYPE_CHECKING:
    from fl_ops.simulate.engine_choice import EngineRequest
    from fl_ops.trackers.opening import Trackers


@contextmanager
def interruptible(outcome: str) -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP, too, and print the outcome on stderr."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {outcome}", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda|cuda:1", help="Device of the engine batched. Default: cpu.")
]
Precision = Annotated[
    Literal["float32", "tf32", "bfloat16"] | None,
    typer.Option(help="Precision of the engine batched for products in training. Default: float32."),
]


@dataclass(frozen=True)
class EngineFlags(FlagGroup):
    """How the clients of `fl simulate` train. The fields are those of `EngineRequest`, which loads torch."""

    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that train a run's clients. Default: the processors here, divided by runs."
        ),
    ] = None
    engine: Annotated[
        Literal["workers", "sequential", "batched"] | None,
        typer.Option(
            help="How clients train: in worker processes, one after the other, or many in lockstep as one model. "
            "Default: workers, and batched with --device cuda."
        ),
    ] = None
    device: Device = None
    strategy: Annotated[
        Literal["grouped", "one_by_one", "streams"] | None,
        typer.Option(
            help="How the engine batched computes gradients. Default: the fastest one, measured at the start."
        ),
    ] = None
    group: Annotated[
        int | None,
        typer.Option(min=1, help="Most clients in lockstep of the engine batched. Default: as many as memory allows."),
    ] = None
    precision: Precision = None

    def request(self) -> EngineRequest:
        """The engine that is asked for."""
        from fl_ops.simulate.engine_choice import EngineRequest  # imported here: it loads torch

        return EngineRequest(**vars(self))


@dataclass(frozen=True)
class CellEngineFlags(FlagGroup):
    """How the clients of a run of `fl compare` train: in its process."""

    engine: Annotated[
        Literal["sequential", "batched"],
        typer.Option(help="How the clients of a run train: one after the other, or many in lockstep as one model."),
    ] = "sequential"
    device: Device = None
    precision: Precision = None

    def request(self) -> EngineRequest:
        """The engine that is asked for."""
        from fl_ops.simulate.engine_choice import EngineRequest  # imported here: it loads torch

        return EngineRequest(workers=1, **vars(self))


@dataclass(frozen=True)
class TrackerFlags(FlagGroup):
    """The places where runs are tracked."""

    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write event files for TensorBoard, in a folder of DIR for each run."),
    ] = None
    mlflow: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Log to MLflow: http://host:5000, sqlite:///file.db or a folder."),
    ] = None

    def checked(self) -> Trackers:
        """The trackers. Raises UsageError for a library that is not installed."""
        from fl_ops.trackers.opening import Trackers

        trackers = Trackers(self.tensorboard, self.mlflow)
        trackers.check()
        return trackers


_connection = functools.partial(
    typer.Option, rich_help_panel="Connection (also by environment variables, or in ~/.config/impetus/fl.toml)"
)
"""An option of the connection."""


@dataclass(frozen=True)
class ConnectionFlags(FlagGroup):
    """The options of commands that call a coordinator. The fields are those of `settings.Layer`."""

    server: Annotated[
        str | None,
        _connection(
            help=f"Admin address of the coordinator, by default {settings.DEFAULT_SERVER}. FL_ADMIN",
            metavar="HOST:PORT",
        ),
    ] = None
    ca: Annotated[Path | None, _connection(help="Certificate of the authority. FL_CA", metavar="FILE")] = None
    cert: Annotated[Path | None, _connection(help="Your certificate. FL_CERT", metavar="FILE")] = None
    key: Annotated[Path | None, _connection(help="Its private key. FL_KEY", metavar="FILE")] = None
    token_file: Annotated[
        Path | None,
        _connection(
            help="A token (OIDC), in place of a certificate. FL_TOKEN_FILE; FL_TOKEN has the token itself",
            metavar="FILE",
        ),
    ] = None
    insecure: Annotated[
        bool | None, _connection("--insecure", help="Connect in plain text, on this machine only. FL_INSECURE=1")
    ] = None
    insecure_remote: Annotated[
        bool | None, _connection("--insecure-remote", help="Allow plain text to other machines. FL_INSECURE_REMOTE=1")
    ] = None
    proxy: Annotated[
        str | None,
        _connection(
            help='HTTP proxy: "none", "environment" (default) or URL. None to this machine. FL_PROXY', metavar="PROXY"
        ),
    ] = None


@dataclass(frozen=True)
class OutputFlags(FlagGroup):
    """The options of every command."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")] = False


@dataclass(frozen=True)
class Context:
    """The values of the shared options: the output format, and the connection to the coordinator."""

    as_json: bool
    layer: settings.Layer

    def connect(self) -> AdminClient:
        """A client of the coordinator's admin port; a context manager."""
        return AdminClient(settings.load(self.layer))

    def call(self, request: Message, response: type[Response]) -> Response:
        """The coordinator's response to a request. response: its type."""
        with self.connect() as client:
            return client.call(request, response)

    def show(self, result: output.Result, rendering: output.Rendering) -> None:
        """Print the command's result in the output format."""
        output.show(result, rendering, self.as_json)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command that works on this machine: adds --json, and passes a `Context` first."""
    return _wrapped(function, connects=False)


def admin_command(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command that calls a coordinator: adds --json and connection options, passes a `Context` first."""
    return _wrapped(function, connects=True)


def _wrapped(function: Callable[..., None], *, connects: bool) -> Callable[..., None]:
    grouped = with_groups(function)

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        layer = settings.Layer(**vars(ConnectionFlags.taken_from(arguments))) if connects else settings.Layer()
        context = Context(OutputFlags.taken_from(arguments).as_json, layer)
        # Errors become a line on stderr and an exit code. A traceback is of foreign code only.
        try:
            with raised_interrupts():
                grouped(context=context, **arguments)
        except OpsError as exc:
            output.show_error(str(exc), exc.trace or traceback_of(exc))
            raise typer.Exit(exc.code) from exc
        except KeyboardInterrupt as exc:
            raise typer.Exit(Exit.INTERRUPTED) from exc
        except ModuleNotFoundError as exc:
            if exc.name not in SERVER:
                raise
            output.show_error(f"this command runs the coordinator's code, {server_packages_missing('which')}")
            raise typer.Exit(Exit.MISUSED) from exc

    _, *own = inspect.signature(grouped).parameters.values()
    shared = [*OutputFlags.parameters(), *(ConnectionFlags.parameters() if connects else ())]
    set_parameters(run, [*own, *shared])
    return run


def labels_of(given: Sequence[str], where: str) -> dict[str, str]:
    """Labels by key. Raises UsageError, which names where the text without a key is."""
    for text in given:
        if not text.partition("=")[1]:
            raise UsageError(f"{where}: expected KEY=VALUE, got {text!r}")
    return {key: value for key, _, value in (text.partition("=") for text in given)}


def confirm(question: str, instead: str) -> None:
    """Ask on a terminal. Raises Refused after a no, and UsageError without a terminal. instead: the option for yes."""
    if not sys.stdin.isatty():
        raise UsageError(f"expected a terminal to ask on, or {instead}")
    if not typer.confirm(question, err=True):
        raise Refused("nothing was changed")
