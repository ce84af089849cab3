"""`fl clients`: list, ban, release and drain clients."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fl_common.command_help import Group, examples
from fl_ops.commands import completion
from fl_ops.commands.options import Context, admin_command, labels_of
from fl_ops.errors import UsageError
from fl_ops.render import tables
from fl_web.facts.words import ClientStateWord, client_number
from protos.fl.v1 import admin_pb2

app = typer.Typer(cls=Group, no_args_is_help=True, help="List clients and control which of them take part.")
Client = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The client's id, as `fl clients list` shows it.", autocompletion=completion.client_names
    ),
]
Reason = Annotated[str, typer.Option(help="Stored in the history and shown in the list.")]


ORDERS: dict[str, admin_pb2.ClientOrder] = {
    "id": admin_pb2.CLIENT_ORDER_ID, "state": admin_pb2.CLIENT_ORDER_STATE,
    "last-seen": admin_pb2.CLIENT_ORDER_LAST_SEEN, "counted": admin_pb2.CLIENT_ORDER_UPDATES_COUNTED,
    "refused": admin_pb2.CLIENT_ORDER_UPDATES_REFUSED, "failed": admin_pb2.CLIENT_ORDER_FAILED,
    "failed-share": admin_pb2.CLIENT_ORDER_FAILED_SHARE, "work": admin_pb2.CLIENT_ORDER_WORK_SECONDS,
    "transfer": admin_pb2.CLIENT_ORDER_TRANSFER_SECONDS, "last-share": admin_pb2.CLIENT_ORDER_LAST_SHARE,
    "epsilon": admin_pb2.CLIENT_ORDER_EPSILON, "attention": admin_pb2.CLIENT_ORDER_ATTENTION,
    "version": admin_pb2.CLIENT_ORDER_VERSION,
}  # fmt: skip
Sort = Literal[
    "id", "state", "last-seen", "counted", "refused", "failed", "failed-share", "work", "transfer", "last-share",
    "epsilon", "attention", "version",
]  # fmt: skip


@app.command(
    "list",
    **examples("fl clients list", "fl clients list --attention", "fl clients list --sort failed-share --limit 10"),
)
@admin_command
def list_clients(
    context: Context,
    state: Annotated[
        ClientStateWord | None, typer.Option(help="Only clients in this state, by default in all.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only clients with this label; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Largest number of clients. 0: all.")] = 0,
    sort: Annotated[
        Sort,
        typer.Option(
            help="The order: by id, state and version from the first one, by all else from the largest value."
        ),
    ] = "id",
    attention: Annotated[
        bool, typer.Option("--attention", help="Only clients that need attention, the most urgent first.")
    ] = False,
    older_than: Annotated[
        str, typer.Option(metavar="VERSION", help="Only clients with software older than this, such as 0.2.")
    ] = "",
) -> None:
    """List all clients that have registered and were not forgotten."""
    by = "attention" if attention and sort == "id" else sort
    with context.connect() as client:
        labels = labels_of(label or [], "--label")
        clients = client.clients.list_clients(
            client_number(state or ""), labels, limit, ORDERS[by], ["attention"] if attention else [], older_than
        )
    if not clients and (attention or older_than):
        none = "no client needs attention" if attention else f"no client has software older than {older_than}"
        context.show(clients, none)
        return
    context.show(clients, lambda: tables.clients_table(clients))


@app.command(**examples("fl clients show edge-3"))
@admin_command
def show(
    context: Context,
    name: Client,
    history: Annotated[int, typer.Option(min=1, help="Number of history entries to show, the newest.")] = 10,
) -> None:
    """Show one client: its session and address, its current work and its history."""
    request = admin_pb2.GetClientRequest(client_id=name, history=history)
    details = context.call(request, admin_pb2.GetClientResponse)
    context.show(details, tables.client_details(details))


@app.command(**examples("fl clients ban edge-3 --reason 'lost device'"))
@admin_command
def ban(context: Context, name: Client, reason: Reason) -> None:
    """Refuse a client from now on; its work is given to others."""
    with context.connect() as client:
        _show_client(context, client.clients.ban_client(name, reason))


@app.command(**examples("fl clients unban edge-3"))
@admin_command
def unban(context: Context, name: Client) -> None:
    """Admit a banned client again."""
    request = admin_pb2.UnbanClientRequest(client_id=name)
    _show_client(context, context.call(request, admin_pb2.UnbanClientResponse).client)


@app.command(**examples("fl clients release edge-3"))
@admin_command
def release(context: Context, name: Client) -> None:
    """End a client's quarantine, and admit it to runs that left it out for lost states."""
    request = admin_pb2.ReleaseClientRequest(client_id=name)
    _show_client(context, context.call(request, admin_pb2.ReleaseClientResponse).client)


@app.command(**examples("fl clients forget edge-3"))
@admin_command
def forget(context: Context, name: Client) -> None:
    """Remove a client from the roster for good. It may register again, unless it is banned; a ban stays."""
    with context.connect() as client:
        banned = client.clients.forget_client(name)
    suffix = f"; it stays banned until `fl clients unban {name}`" if banned else ""
    context.show({"client_id": name, "still_banned": banned}, f"forgot {name}{suffix}")


@app.command(**examples("fl clients drain edge-3 --reason maintenance", "fl clients drain edge-3 --undo"))
@admin_command
def drain(
    context: Context,
    name: Client,
    reason: Reason = "",
    undo: Annotated[bool, typer.Option("--undo", help="Assign work again.")] = False,
) -> None:
    """Let a client finish its current work, and assign nothing new."""
    request = admin_pb2.DrainClientRequest(client_id=name, reason=reason, undo=undo)
    _show_client(context, context.call(request, admin_pb2.DrainClientResponse).client)


@app.command(
    **examples(
        "fl clients revoke edge-3 --reason 'stolen'",
        "fl clients revoke --serial 3fc5c471639990701528a49cf4a137f2640da0b1 --reason 'renewed by a copy'",
    )
)
@admin_command
def revoke(
    context: Context,
    reason: Reason,
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="The client's id.", autocompletion=completion.client_names)
    ] = "",
    serial: Annotated[str, typer.Option(metavar="HEX", help="One certificate, by its serial number.")] = "",
    public_key: Annotated[str, typer.Option(metavar="HEX", help="All certificates with this key: its SHA-256.")] = "",
) -> None:
    """Deny a client's certificates for good, and end its calls. It needs a new token and a new key to come back.

    `fl clients ban` is the other way round: it refuses the name, whatever certificate comes.
    """
    given = {kind: value for kind, value in (("name", name), ("serial", serial), ("key", public_key)) if value}
    if len(given) != 1:
        raise UsageError(f"expected one of NAME, --serial and --public-key, got {' and '.join(given) or 'none'}")
    with context.connect() as client:
        revoked = client.access.revoke_certificates(reason, **given)
    context.show(revoked, tables.certificates_table(revoked))


def _show_client(context: Context, client: admin_pb2.ClientStatus) -> None:
    context.show(client, tables.clients_table([client]))
