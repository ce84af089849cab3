"""`fl packages`: sign wheels of task code as a package, release it to devices in stages, take it back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from blake3 import blake3

from fl_common.command_help import Group, examples
from fl_common.packages import PackageRefused, pack, unpack
from fl_common.settings import SettingsError
from fl_common.signatures import read_key
from fl_ops.commands.coordinator.releases import Reason, Stage, StageFlags, Version, begin_stage, share_of, take_back
from fl_ops.commands.options import Context, admin_command, command
from fl_ops.errors import UsageError
from fl_ops.render.releases import packages_table, release_details
from protos.codec import digest_message
from protos.fl.v1 import admin_pb2

app = typer.Typer(cls=Group, no_args_is_help=True, help="Packages of task code: signed wheels that devices may run.")
KIND = "package"
Name = Annotated[str, typer.Argument(metavar="PACKAGE", help="The package's name, as `fl packages list` shows it.")]


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
    context.show(facts, text)


@app.command(
    **examples("fl packages add wounds-1.2.package", "fl packages add wounds-1.3.package --stage 10% --stage 50%")
)
@admin_command
def add(
    context: Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Of `fl packages sign`.")],
    by: StageFlags,
    most_rise: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Take it back if the share of work that fails is larger by more than this than with the one before.",
        ),
    ] = "10%",
) -> None:
    """Release a package to the devices whose settings name it, in place of the version before, and begin its stages."""
    rules = by.staged()
    rules.most_rise = share_of(most_rise, "--most-rise")
    try:
        digest = blake3(file.read_bytes()).digest()
        opened = file.open("rb")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    with opened, context.connect() as client:
        client.models.upload_model(opened, release=True)
        request = admin_pb2.AddPackageRequest(digest=digest_message(digest), rules=rules)
        added = client.call(request, admin_pb2.AddPackageResponse).release
    context.show(added, lambda: release_details(added))


@app.command("list", **examples("fl packages list"))
@admin_command
def list_packages(
    context: Context, name: Annotated[str, typer.Option(help="Only versions of this package.")] = ""
) -> None:
    """List the packages, the newest first, and what became of them on devices."""
    with context.connect() as client:
        listed = client.models.list_releases(name, KIND)
    context.show(listed, lambda: packages_table(listed))


@app.command(**examples("fl packages show wounds", "fl packages show wounds --version 2"))
@admin_command
def show(context: Context, name: Name, version: Version = 0) -> None:
    """Show a version of a package, what became of it on each device, and how much work failed with it."""
    with context.connect() as client:
        response = client.models.get_release(name, version, KIND)
    context.show(response, lambda: release_details(response.release, response.devices))


@app.command(**examples("fl packages advance wounds", "fl packages advance wounds --stage 50%"))
@admin_command
def advance(context: Context, name: Name, stage: Stage = None) -> None:
    """Send the newest version to more devices."""
    begin_stage(context, KIND, name, stage)


@app.command(**examples("fl packages rollback wounds --reason 'too slow on old cameras'"))
@admin_command
def rollback(context: Context, name: Name, reason: Reason = "", version: Version = 0) -> None:
    """Take a version back: its devices use the one before it."""
    take_back(context, KIND, name, version, reason)
