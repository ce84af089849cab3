"""`fl web`: the web page of a coordinator on this machine, with the identity of the caller; and `fl web open`.

With `fl web`, this process reads with the caller's identity and serves the page itself. With `fl web open`, the
coordinator serves it (`web_listen`), and makes a login link for the caller's browser.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Literal

import typer

from fl_common import units
from fl_common.extras import install_hint
from fl_common.settings import is_loopback
from fl_ops.admin import settings
from fl_ops.commands.options import Context, admin_command
from fl_ops.errors import UsageError
from protos.fl.v1 import admin_pb2

DEFAULT_LISTEN = "127.0.0.1:7080"
_HOW = "Start `fl web` again for a new login link."


@admin_command
def web(
    context: Context,
    action: Annotated[
        Literal["open"] | None,
        typer.Argument(help="open: show a login link of the page that the coordinator itself serves."),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="Address of the page, on this machine.", metavar="HOST:PORT")
    ] = DEFAULT_LISTEN,
) -> None:
    """Show runs and clients in a browser, live and read only, until Ctrl-C."""
    if action == "open":
        _open(context)
        return
    host, port = _address(listen)
    connection = settings.load(context.layer)
    asyncio.run(_serve(context, connection, (host, port)))


async def _serve(context: Context, connection: settings.Connection, address: tuple[str, int]) -> None:
    try:
        from fl_web.access.identities import OneOperator
        from fl_web.app import guarded_app
        from fl_web.coordinator.reader import Reader
        from fl_web.serve import listen, serve
    except ModuleNotFoundError as error:
        raise UsageError(f"fl web needs {error.name}, which is not installed: {install_hint('web')}") from error
    from fl_ops.admin.calls import call_metadata, open_channel

    try:
        listening = listen(*address)
    except OSError as error:
        raise UsageError(f"--listen {address[0]}:{address[1]}: {error.strerror}") from error
    host, port = listening.getsockname()[:2]
    page = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    channel = open_channel(connection)
    identities = OneOperator(Reader(channel, partial(call_metadata, connection)))
    link = f"{page}login?code={identities.code}"
    context.show({"address": page, "link": link}, lambda: f"{link}\nThe link lets one browser in.")
    try:
        await serve(guarded_app(identities, _HOW), listening)
    finally:
        await identities.close()
        await channel.close()


def _open(context: Context) -> None:
    """Show a login link of the coordinator's own page."""
    made = context.call(admin_pb2.CreateWebLinkRequest(), admin_pb2.CreateWebLinkResponse)
    until = f"\nOne browser can use it, until {units.moment(made.expires)}." if made.HasField("expires") else ""
    context.show(made, lambda: f"{made.url}{until}")


def _address(text: str) -> tuple[str, int]:
    """Host and port. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"--listen: expected HOST:PORT such as {DEFAULT_LISTEN}, got {text!r}")
    if not is_loopback(host):
        raise UsageError(f"--listen: expected an address of this machine such as {DEFAULT_LISTEN}, got {text!r}")
    return host, int(port)
