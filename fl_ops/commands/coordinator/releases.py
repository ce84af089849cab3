"""`fl release`: release a run's model to devices, in stages, with a way back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict

from fl_common.command_help import FlagGroup, Group, examples
from fl_common.names import ID_PATTERN
from fl_common.released import FORMS, PURPOSE, digest_text
from fl_common.settings import SettingsError
from fl_common.signatures import SigningKey, make_key, read_key
from fl_ops.commands import completion
from fl_ops.commands.options import Context, admin_command, command, labels_of
from fl_ops.errors import UsageError
from fl_ops.exports.bundle import bundled
from fl_ops.files import read_run
from fl_ops.render.releases import release_details, releases_table
from protos.fl.v1 import admin_pb2


class _Group(Group):
    """A run in place of a command means `fl release create`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command and its arguments."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["create", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Group, no_args_is_help=True, help="Release a run's model to devices, signed, in stages, with a way back."
)
Name = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name, as `fl release list` shows it.")]
Version = Annotated[int, typer.Option(min=0, help="The version. 0: the newest.")]
Stage = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Share of the devices. Without it that of the next stage.")
]
Reason = Annotated[str, typer.Option(help="Stored in the history, and shown in the list.")]


def share_of(text: str, where: str) -> float:
    """A share such as 10% or 0.1. Raises UsageError."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{where}: expected a share such as 10% or 0.1, got {text!r}")
    return share


@dataclass(frozen=True)
class WhatFlags(FlagGroup):
    """Which model, in which form."""

    which: Annotated[str, typer.Option("--round", metavar="latest|best|N", help="The committed model.")] = "latest"
    averaged: Annotated[bool, typer.Option("--averaged", help="The mean of the committed models up to it.")] = False
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="|".join(FORMS),
            help="whole: the state_dict; adapter: in peft's format, too; onnx: as a graph, too, which is compared with"
            " the model before it is signed.",
        ),
    ] = "whole"
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=r"A run's file, whose \[task] is imported if the form needs the model."),
    ] = None
    name: Annotated[
        str, typer.Option(metavar="MODEL", help="The model's name on devices. Empty: that of the run's task.")
    ] = ""
    sign_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="FL_RELEASE_KEY", help="The private key that signs: `fl release key` makes one."
        ),
    ] = None
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only to devices with this label; may be repeated. Without it to all."),
    ] = None

    def check(self) -> None:
        """Raises UsageError."""
        if self.which not in {"latest", "best"} and not (self.which.isascii() and self.which.isdigit()):
            raise UsageError(f"--round: expected latest, best or a round's number, got {self.which!r}")
        if self.form not in FORMS:
            raise UsageError(f"--format: expected {', '.join(FORMS[:-1])} or {FORMS[-1]}, got {self.form!r}")

    def name_of(self, task: str) -> str:
        """The name of the released model: the task's, without its module, if none is given. Raises UsageError."""
        name = self.name or task.rpartition(":")[2]
        if ID_PATTERN.fullmatch(name) is None:
            raise UsageError(f"--name: expected a name of A-Z a-z 0-9 . _ -, got {name!r}")
        return name

    def key(self) -> SigningKey:
        """The key that signs. Raises UsageError."""
        if self.sign_key is None:
            raise UsageError("--sign-key: expected a file with a private key: `fl release key FILE` makes one")
        try:
            return read_key(self.sign_key, "--sign-key")
        except SettingsError as error:
            raise UsageError(str(error)) from None


@dataclass(frozen=True)
class StageFlags(FlagGroup):
    """The rules by which a release of any kind goes on and back."""

    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the devices that get it first, such as 10%; repeat it for more stages. The last stage is"
            " always 100%.",
        ),
    ] = None
    advance_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Begin the next stage by itself after this time. 0: by `advance` only."
        ),
    ] = 0.0
    most_failed: Annotated[
        str, typer.Option(metavar="SHARE", help="Roll back if more of its devices refuse it, fail or get worse.")
    ] = "10%"

    def staged(self) -> admin_pb2.ReleaseRules:
        """The rules. Raises UsageError."""
        return admin_pb2.ReleaseRules(
            stages=sorted({*(share_of(text, "--stage") for text in self.stage or ()), 1.0}),
            advance_after_s=self.advance_after,
            most_failed=share_of(self.most_failed, "--most-failed"),
        )


@dataclass(frozen=True)
class RuleFlags(StageFlags):
    """The rules by which a released model goes on and back."""

    metric: Annotated[str, typer.Option(help="The metric of the task that must not get worse.")] = ""
    most_drop: Annotated[
        float, typer.Option(min=0, help="How much worse the metric may be than with the version before.")
    ] = 0.0
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="Of the metric.")] = False

    def rules(self, stop: admin_pb2.StopSpec) -> admin_pb2.ReleaseRules:
        """The rules. stop: of the run, which knows the direction of its metric. Raises UsageError."""
        rules = self.staged()
        lower = self.lower_is_better or (self.metric == (stop.metric or "loss") and stop.lower_is_better)
        rules.metric, rules.most_drop = self.metric, self.most_drop
        rules.lower_is_better = lower or self.metric == "loss"
        return rules


@app.command(
    **examples(
        "fl release create digits-1 --round best --to site=north --stage 10% --sign-key release.pem",
        "fl release create digits-1 --stage 10% --stage 50% --advance-after 86400 --metric accuracy --most-drop 0.02",
    )
)
@admin_command
def create(
    context: Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", autocompletion=completion.run_names)],
    what: WhatFlags,
    by: RuleFlags,
) -> None:
    """Release a run's model: sign it, send it, and begin its first stage."""
    what.check()
    key, labels = what.key(), labels_of(what.to or [], "--to")
    with context.connect() as client:
        spec = client.runs.get_run(run, 0).run.spec
        rules, name = by.rules(spec.stop), what.name_of(spec.task.name)
        if spec.personal and what.form == "onnx":
            raise UsageError(
                "--format: expected whole, got onnx, whose graph has all values: the run's personal parameters"
                f" ({', '.join(spec.personal)}) are different on each device"
            )
        newest = max((release.version for release in client.models.list_releases(name)), default=0)

        def task() -> Any:
            from fl_ops.exports.formats import task_of  # imported here: it loads torch

            of = spec.task if what.config is None else read_run(what.config).task
            return task_of(of.name, MessageToDict(of.options), trusted=what.config is not None)

        parts = client.models.export_model(run, what.which, "averaged" if what.averaged else "committed")
        with bundled(parts, what.form, task) as bundle:
            base = {"model": name, "version": newest + 1, "run": run, "task": spec.task.name, "form": what.form}
            described = bundle.described({**base, "labels": labels, "personal": list(spec.personal)}).to_bytes()
            client.models.upload_model(bundle.file, release=True)
            request = admin_pb2.CreateReleaseRequest(
                description=described,
                signature=key.sign(PURPOSE, digest_text(described)),
                signer=key.signer,
                rules=rules,
            )
            created = client.call(request, admin_pb2.CreateReleaseResponse).release
    context.show(created, lambda: release_details(created))


@app.command("list", **examples("fl release list"))
@admin_command
def list_releases(
    context: Context, model: Annotated[str, typer.Option(help="Only releases of this model.")] = ""
) -> None:
    """List the released models, the newest first."""
    with context.connect() as client:
        releases = client.models.list_releases(model)
    context.show(releases, lambda: releases_table(releases))


@app.command(**examples("fl release show digits", "fl release show digits --version 2"))
@admin_command
def show(context: Context, model: Name, version: Version = 0) -> None:
    """Show a release and what became of it on each device."""
    with context.connect() as client:
        response = client.models.get_release(model, version)
    context.show(response, lambda: release_details(response.release, response.devices))


@app.command(**examples("fl release advance digits", "fl release advance digits --stage 50%"))
@admin_command
def advance(context: Context, model: Name, stage: Stage = None) -> None:
    """Send the newest version to more devices."""
    begin_stage(context, "model", model, stage)


def begin_stage(context: Context, kind: str, name: str, stage: str | None) -> None:
    """Begin a stage of the newest version of a model or package, and show it. Raises UsageError."""
    share = None if stage is None else share_of(stage, "--stage")
    request = admin_pb2.AdvanceReleaseRequest(kind=kind, model=name, share=share)
    release = context.call(request, admin_pb2.AdvanceReleaseResponse).release
    context.show(release, lambda: release_details(release))


@app.command(**examples("fl release rollback digits --reason 'too slow on old cameras'"))
@admin_command
def rollback(context: Context, model: Name, reason: Reason = "", version: Version = 0) -> None:
    """Take a version back: its devices use the one before it."""
    take_back(context, "model", model, version, reason)


def take_back(context: Context, kind: str, name: str, version: int, reason: str) -> None:
    """Take a version of a model or package back, and show it."""
    request = admin_pb2.RollBackReleaseRequest(kind=kind, model=name, version=version, reason=reason)
    release = context.call(request, admin_pb2.RollBackReleaseResponse).release
    context.show(release, lambda: release_details(release))


@app.command(**examples("fl release key release.pem"))
@command
def key(context: Context, path: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")]) -> None:
    r"""Make a key that signs releases. Devices name its public half in \[releases] signers."""
    try:
        signer = make_key(path).signer
    except SettingsError as error:
        raise UsageError(str(error)) from None
    text = f'{path}: keep it secret. For the settings of devices:\n\n[releases]\nsigners = ["{signer}"]'
    context.show({"path": str(path), "signer": signer}, text)
