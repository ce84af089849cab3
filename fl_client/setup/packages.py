"""`fl-client packages`: the packages on this device, and the owner's decisions about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fl_client.errors import UsageError
from fl_client.packages.held import HeldPackages
from fl_client.policy.config import Policy
from fl_client.setup.settings_file import ConfigFile, read
from fl_client.setup.units import CONFIG
from fl_common.command_help import Group, examples
from fl_common.packages import Manifest, PackageRefused

app = typer.Typer(cls=Group, no_args_is_help=True, help="Packages of task code: what came, and what may run.")
_Which = Annotated[str, typer.Argument(metavar="DIGEST", help="The digest, or how it begins.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


@app.command("list", **examples("fl-client packages list"))
def list_packages(config: ConfigFile = Path(CONFIG), as_json: _Json = False) -> None:
    """List the packages on this device, and whether they may run."""
    held, policy = _opened(config)
    rows = [(manifest, _state(held, manifest, policy)) for manifest in held.manifests()]
    if as_json:
        print(json.dumps([{**manifest.model_dump(), "digest": manifest.digest, "state": it} for manifest, it in rows]))
        return
    for manifest, state in rows:
        print(f"{manifest.name} {manifest.version} {manifest.digest}: {state}")
    if not rows:
        print("no package has come")


@app.command(**examples("fl-client packages show sha256:3f9a"))
def show(which: _Which, config: ConfigFile = Path(CONFIG)) -> None:
    """Show what a package has, who signed it, and whether it may run."""
    held, policy = _opened(config)
    manifest = _found(held, which)
    print(f"{manifest.name} {manifest.version}\ndigest   {manifest.digest}\nsigner   {manifest.signer}")
    for wheel in manifest.wheels:
        print(f"wheel    {wheel.file}, {wheel.size:,} bytes, {wheel.digest}\n         signed by {wheel.signer}")
    print(f"state    {_state(held, manifest, policy)}")


@app.command(**examples("fl-client packages approve sha256:3f9a"))
def approve(which: _Which, config: ConfigFile = Path(CONFIG)) -> None:
    """Let a package run, if the site's policy names its signers. A running daemon starts it within seconds."""
    _decide(config, which, may_run=True)


@app.command(**examples("fl-client packages revoke sha256:3f9a"))
def revoke(which: _Which, config: ConfigFile = Path(CONFIG)) -> None:
    """Let a package run no more. A running daemon ends its process within seconds."""
    _decide(config, which, may_run=False)


def _decide(config: Path, which: str, *, may_run: bool) -> None:
    held, policy = _opened(config)
    manifest = _found(held, which)
    try:
        (held.approve if may_run else held.revoke)(manifest.digest)
    except OSError as error:
        raise UsageError(f"the decision cannot be written: {error}") from None
    print(f"{manifest.title}: {_state(held, manifest, policy)}")


def _opened(config: Path) -> tuple[HeldPackages, Policy]:
    settings, policy = read(config)
    return HeldPackages(settings.state_dir), policy


def _found(held: HeldPackages, which: str) -> Manifest:
    begins = which if which.startswith("sha256:") else f"sha256:{which}"
    fitting = [manifest for manifest in held.manifests() if manifest.digest.startswith(begins)]
    if len(fitting) != 1:
        raise UsageError(f"expected the digest of one package, or how it begins, got {which!r}: {len(fitting)} fit")
    return fitting[0]


def _state(held: HeldPackages, manifest: Manifest, policy: Policy) -> str:
    try:
        held.allow(manifest, policy)
    except PackageRefused as error:
        return f"refused, {error.rule}: {error}"
    return "may run"
