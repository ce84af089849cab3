"""`fl enroll`: tokens with which devices get their first certificate. `fl certificates`: what was issued."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fl_common import units
from fl_common.command_help import FlagGroup, Group, examples
from fl_common.settings import split_address
from fl_common.units import counted
from fl_ops.admin import settings
from fl_ops.commands.options import Context, admin_command, labels_of
from fl_ops.errors import UsageError
from fl_ops.files import PRIVATE, Target, check_free, written_whole
from fl_ops.render import tables
from protos.fl.v1 import admin_pb2

app = typer.Typer(cls=Group, no_args_is_help=True, help="Make tokens with which devices get their first certificate.")
certificates_app = typer.Typer(cls=Group, no_args_is_help=True, help="List the certificates of devices.")
ENROLL_PORT = 7074
"""The port that `fl-client init` uses for enrollment where nothing names one."""
_MOST = 1000
"""Tokens in one call."""
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True)
class Made:
    """New tokens."""

    created: Sequence[admin_pb2.CreatedEnrollment]
    fingerprint: str
    server: str
    """The address for clients, as devices dial it."""
    enroll_server: str
    """The address for enrollment."""

    def command(self, token: str) -> str:
        """The command for a device."""
        usual = (split_address(self.server)[0], ENROLL_PORT)
        place = "" if split_address(self.enroll_server) == usual else f" --enroll-server {self.enroll_server}"
        return f"fl-client init --server {self.server}{place} --ca-fingerprint {self.fingerprint} {token}"


@dataclass(frozen=True)
class DeviceFlags(FlagGroup):
    """The devices that get tokens."""

    name: Annotated[str, typer.Option(help="Name of the device, which is its client id.")] = ""
    prefix: Annotated[str, typer.Option(help="Beginning of the names; with --count or --uses.")] = ""
    count: Annotated[int, typer.Option(min=0, help="Tokens for the names PREFIX1, PREFIX2, ... one for each.")] = 0
    uses: Annotated[int, typer.Option(min=0, help="One token for so many devices, which choose their names.")] = 0
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="A line NAME,KEY=VALUE;KEY=VALUE for each device.")
    ] = None

    def specs(self) -> list[admin_pb2.EnrollmentSpec]:
        """The tokens to make. Raises UsageError unless exactly one way to name them is used."""
        name, prefix, count, uses = self.name, self.prefix, self.count, self.uses
        ways = [bool(name), bool(prefix and count), bool(prefix and uses), self.table is not None]
        if sum(ways) != 1 or (prefix and (name or self.table)) or ((count or uses) and not prefix):
            raise UsageError(
                "expected one of --name NAME, --prefix PREFIX --count N, --prefix PREFIX --uses N, and --csv FILE"
            )
        if self.table is not None:
            return _read(self.table)
        if count:
            return [admin_pb2.EnrollmentSpec(name=f"{prefix}{number}") for number in range(1, count + 1)]
        return [admin_pb2.EnrollmentSpec(name=name, name_prefix=prefix, uses=uses)]


@app.command(
    **examples(
        "fl enroll create --name edge-7 --ttl 1h --label site=north",
        "fl enroll create --prefix edge- --count 100 --out tokens.csv",
        "fl enroll create --csv devices.csv --out tokens.csv",
        "fl enroll create --prefix gpu- --uses 50 --ttl 7d",
    )
)
@admin_command
def create(
    context: Context,
    devices: DeviceFlags,
    *,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label for the client; may be repeated.")
    ] = None,
    ttl: Annotated[str, typer.Option(help="How long the token can be used: 30m, 1h, 7d. Empty: the server's.")] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write name,token lines to a file that only you can read.")
    ] = None,
) -> None:
    """Make tokens, each for one certificate. A token is shown once; the coordinator keeps only a hash of it."""
    specs = devices.specs()
    for spec in specs:
        spec.labels.update({**labels_of(label or [], "--label"), **spec.labels})
    seconds = _seconds(ttl)
    if out is not None:
        check_free(Target(out, PRIVATE), "tokens in it may be in use; choose another --out")
    made = _create(context, specs, seconds)
    if out is not None:
        with written_whole(Target(out, PRIVATE)) as file:
            file.write(_lines(made).encode())
    facts = {
        "tokens": [{"name": _name(token), "token": token.token} for token in made.created] if out is None else str(out),
        "expires": made.created[0].enrollment.expires.ToJsonString(),
        "ca_fingerprint": made.fingerprint,
        "command": made.command(f"--token {made.created[0].token}" if len(specs) == 1 and out is None else "--token T"),
    }
    context.show(facts, _text(made, out))


@app.command("list", **examples("fl enroll list"))
@admin_command
def list_tokens(context: Context) -> None:
    """List the tokens, the newest first, without their secrets."""
    with context.connect() as client:
        tokens = client.access.list_enrollments()
    context.show(tokens, lambda: tables.tokens_table(tokens))


@app.command(**examples("fl enroll revoke 3f9ac01be77d1203 --reason 'sent to the wrong person'"))
@admin_command
def revoke(
    context: Context,
    token: Annotated[str, typer.Argument(metavar="ID", help="The part of the token before the dot.")],
    reason: Annotated[str, typer.Option(help="Stored in the history.")] = "",
) -> None:
    """Make a token useless. Certificates that were issued for it stay valid."""
    request = admin_pb2.RevokeEnrollmentRequest(id=token.partition(".")[0], reason=reason)
    enrollment = context.call(request, admin_pb2.RevokeEnrollmentResponse).enrollment
    context.show(enrollment, tables.tokens_table([enrollment]))


@certificates_app.command("list", **examples("fl certificates list", "fl certificates list --name edge-7"))
@admin_command
def list_certificates(
    context: Context, name: Annotated[str, typer.Option(help="Only certificates of this client. Empty: all.")] = ""
) -> None:
    """List the certificates that the coordinator issued or revoked, the newest first."""
    with context.connect() as client:
        certificates = client.access.list_certificates(name)
    context.show(certificates, lambda: tables.certificates_table(certificates))


def _read(path: Path) -> list[admin_pb2.EnrollmentSpec]:
    """The devices of a CSV file. Raises UsageError, which names the line."""
    try:
        lines = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--csv: {path} cannot be read: {error}") from None
    specs = []
    for number, cells in enumerate(lines, 1):
        if not cells or (number == 1 and cells[0].strip() == "name"):
            continue
        if len(cells) > 2 or not cells[0].strip():
            raise UsageError(f"--csv: expected NAME,KEY=VALUE;KEY=VALUE in line {number} of {path}, got {cells!r}")
        texts = [label.strip() for label in cells[1].split(";") if label.strip()] if len(cells) > 1 else []
        labels = labels_of(texts, f"--csv, line {number}")
        specs.append(admin_pb2.EnrollmentSpec(name=cells[0].strip(), labels=labels))
    if len({spec.name for spec in specs}) != len(specs) or not specs:
        raise UsageError(f"--csv: expected at least one device in {path}, each once, got {len(specs)}")
    return specs


def _seconds(ttl: str) -> float:
    """A duration such as 1h; 0 for an empty text. Raises UsageError."""
    duration = re.fullmatch(r"([0-9]{1,9})([smhd])", ttl)
    if ttl and (duration is None or not int(duration[1])):
        raise UsageError(f"--ttl: expected a number with s, m, h or d, such as 1h, got {ttl!r}")
    return float(int(duration[1]) * _SECONDS[duration[2]]) if duration else 0.0


def _create(context: Context, specs: Sequence[admin_pb2.EnrollmentSpec], ttl_s: float) -> Made:
    created: list[admin_pb2.CreatedEnrollment] = []
    with context.connect() as client:
        for first in range(0, len(specs), _MOST):
            request = admin_pb2.CreateEnrollmentsRequest(specs=specs[first : first + _MOST], ttl_s=ttl_s)
            answer = client.call(request, admin_pb2.CreateEnrollmentsResponse)
            created += answer.created
    reached = settings.load(context.layer).server.rpartition(":")[0]

    def address(text: str) -> str:
        return f"{reached}{text}" if text.startswith(":") else text

    return Made(created, answer.ca_fingerprint, address(answer.client_address), address(answer.enroll_address))


def _name(created: admin_pb2.CreatedEnrollment) -> str:
    return created.enrollment.spec.name or f"{created.enrollment.spec.name_prefix}*"


def _lines(made: Made) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("name", "token"), *((_name(x), x.token) for x in made.created)])
    return text.getvalue()


def _text(made: Made, out: Path | None) -> str:
    first, number = made.created[0], len(made.created)
    until = units.moment(first.enrollment.expires)
    if out is not None:
        return (
            f"wrote {units.counted(number, 'token')} to {out}, valid until {until}; on each device, with its token:\n\n"
            + made.command("--token TOKEN")
        )
    if number > 1:
        command = made.command("--token TOKEN")
        return f"{_lines(made)}\nvalid until {until}; on each device, with its token:\n\n{command}"
    uses = first.enrollment.spec.uses
    what = f"{_name(first)}, {counted(uses, 'use')}, valid until {until}"
    return f"{what}; on the device:\n\n{made.command(f'--token {first.token}')}"
