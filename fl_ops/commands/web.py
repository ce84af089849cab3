"""`fl web`: the web page of a coordinator on this machine, with the identity of the caller."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import typer

from fl_common.settings import is_loopback
from fl_ops.admin import settings
from fl_ops.commands.options import Context, admin_command
from fl_ops.errors import UsageError
from fl_ops.render import output

DEFAULT_LISTEN = "127.0.0.1:7080"


@admin_command
def web(
    context: Context,
    listen: Annotated[
        str, typer.Option(help="Address of the page, on this machine.", metavar="HOST:PORT")
    ] = DEFAULT_LISTEN,
) -> None:
    """Show runs and clients in a browser, live and read only, until Ctrl-C."""
    host, port = _address(listen)
    connection = settings.load(context.layer)
    asyncio.run(_serve(context, connection, (host, port)))


async def _serve(context: Context, connection: settings.Connection, address: tuple[str, int]) -> None:
    try:
        from fl_web.app import build_app
        from fl_web.coordinator.reader import Reader
        from fl_web.serve import listen, serve, with_reader
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: install impetus-fl[web]") from error
    from fl_ops.admin.async_channel import call_metadata, open_channel

    try:
        listening = listen(*address)
    except OSError as error:
        raise UsageError(f"--listen {address[0]}:{address[1]}: {error.strerror}") from error
    host, port = listening.getsockname()[:2]
    page = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    output.show({"address": page}, lambda: page, context.as_json)
    channel = open_channel(connection)
    reader = Reader(channel, partial(call_metadata, connection))
    try:
        await serve(with_reader(build_app(), reader), listening)
    finally:
        await reader.close()
        await channel.close()


def _address(text: str) -> tuple[str, int]:
    """Host and port. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"--listen: expected HOST:PORT such as {DEFAULT_LISTEN}, got {text!r}")
    if not is_loopback(host):
        raise UsageError(f"--listen: expected an address of this machine such as {DEFAULT_LISTEN}, got {text!r}")
    return host, int(port)
