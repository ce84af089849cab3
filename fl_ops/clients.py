"""`fl clients`: who may take part."""

from __future__ import annotations

from typing import Annotated

import typer

from fl_ops import output, tables
from fl_ops.client_page import client_page
from fl_ops.options import Context, admin_command
from protos.fl.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="See clients and decide who takes part.")
Client = Annotated[str, typer.Argument(metavar="NAME", help="The client's id, as `fl clients list` shows it.")]
Reason = Annotated[str, typer.Option(help="Kept in the history and shown in the list.")]


@app.command("list")
@admin_command
def list_clients(context: Context) -> None:
    """List all clients that ever registered and were not forgotten."""
    with context.connect() as client:
        clients = client.list_clients()
    output.show(clients, tables.clients_table(clients), context.as_json)


@app.command()
@admin_command
def show(
    context: Context,
    name: Client,
    history: Annotated[int, typer.Option(min=1, help="Newest lines of its history to show.")] = 10,
) -> None:
    """Show one client: who speaks for it and from where, what it works on, and what happened to it."""
    with context.connect() as client:
        details = client.get_client(name, history)
    output.show(details, client_page(details), context.as_json)


@app.command()
@admin_command
def ban(context: Context, name: Client, reason: Reason) -> None:
    """Refuse a client from now on and give its work to others."""
    with context.connect() as client:
        _show_client(context, client.ban_client(name, reason))


@app.command()
@admin_command
def unban(context: Context, name: Client) -> None:
    """Let a banned client in again."""
    with context.connect() as client:
        _show_client(context, client.unban_client(name))


@app.command()
@admin_command
def release(context: Context, name: Client) -> None:
    """End a client's quarantine, and let it back into runs that left it out for lost states."""
    with context.connect() as client:
        _show_client(context, client.release_client(name))


@app.command()
@admin_command
def forget(context: Context, name: Client) -> None:
    """Take a client off the roster for good; it may register anew, unless it is banned: a ban stays."""
    with context.connect() as client:
        banned = client.forget_client(name)
    rest = f"; it stays banned until `fl clients unban {name}`" if banned else ""
    output.show({"client_id": name, "still_banned": banned}, f"forgot {name}{rest}", context.as_json)


@app.command()
@admin_command
def drain(
    context: Context,
    name: Client,
    reason: Reason = "",
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
) -> None:
    """Let a client finish what it has and give it nothing new."""
    with context.connect() as client:
        _show_client(context, client.drain_client(name, reason, undo))


def _show_client(context: Context, client: admin_pb2.ClientStatus) -> None:
    output.show(client, tables.clients_table([client]), context.as_json)
