"""`fl packages`: sign wheels of task code as a package, offer it to devices, list what is offered."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from blake3 import blake3
from rich.table import Table

from fl_common.command_help import Group, examples
from fl_common.packages import PackageRefused, pack, unpack
from fl_common.settings import SettingsError
from fl_common.signatures import read_key
from fl_ops.commands.options import Context, admin_command, command
from fl_ops.errors import UsageError
from fl_ops.render import output
from protos.codec import digest_message
from protos.fl.v1 import admin_pb2

app = typer.Typer(cls=Group, no_args_is_help=True, help="Packages of task code: signed wheels that devices may run.")


@app.command(
    **examples("fl packages sign wounds-1.2-py3-none-any.whl --with waves-3.0-py3-none-any.whl --sign-key packages.pem")
)
@command
def sign(
    context: Context,
    wheel: Annotated[Path, typer.Argument(metavar="WHEEL", help="The wheel with the task.")],
    sign_key: Annotated[
        Path, typer.Option(metavar="FILE", envvar="FL_PACKAGE_KEY", help="The private key: `fl release key` makes one.")
    ],
    dependencies: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="WHEEL", help="A wheel that it needs and devices lack; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Without it: NAME-VERSION.package.")] = None,
) -> None:
    """Make a package of wheels, each signed. Nothing of them is run."""
    try:
        key = read_key(sign_key, "--sign-key")
        data = pack([(path.name, path.read_bytes()) for path in (wheel, *(dependencies or []))], key)
        manifest = unpack(data)[0]
        path = out or Path(f"{manifest.name}-{manifest.version}.package")
        path.write_bytes(data)
    except (SettingsError, PackageRefused, ValueError, OSError) as error:
        raise UsageError(str(error)) from None
    facts = {"path": str(path), "digest": manifest.digest, "signer": manifest.signer}
    policy, run = f'[packages]\nsigners = ["{manifest.signer}"]', f'[task]\npackage = "{manifest.digest}"'
    text = f"{path}\ndigest {manifest.digest}\n\nfor the policy of sites:\n{policy}\n\nfor runs:\n{run}"
    output.show(facts, text, context.as_json)


@app.command(**examples("fl packages add wounds-1.2.package"))
@admin_command
def add(context: Context, file: Annotated[Path, typer.Argument(metavar="FILE", help="Of `fl packages sign`.")]) -> None:
    """Offer a package to the devices whose settings name it. It takes the place of the one of its name before."""
    try:
        digest = blake3(file.read_bytes()).digest()
        opened = file.open("rb")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    with opened, context.connect() as client:
        client.models.upload_model(opened, release=True)
        request = admin_pb2.AddPackageRequest(digest=digest_message(digest))
        added = client.call(request, admin_pb2.AddPackageResponse).package
    output.show(added, lambda: _table([added]), context.as_json)


@app.command("list", **examples("fl packages list"))
@admin_command
def list_packages(context: Context) -> None:
    """List the packages, the newest first, and how many devices run each."""
    with context.connect() as client:
        listed = client.call(admin_pb2.ListPackagesRequest(), admin_pb2.ListPackagesResponse).packages
    output.show(list(listed), lambda: _table(listed), context.as_json)


def _table(packages: Iterable[admin_pb2.PackageStatus]) -> Table:
    table = Table("Package", "Version", "Offered", "Devices", "Digest", "Signer")
    for each in packages:
        offered = "yes" if each.current else "no"
        table.add_row(each.name, each.version, offered, f"{each.devices:,}", each.digest, each.signer)
    return table
