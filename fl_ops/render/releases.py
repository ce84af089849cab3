"""Releases as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fl_common import units
from fl_common.units import NOTHING
from fl_ops.render.fitted import Cell, FittedTable
from fl_ops.render.text import fact_grid, plain
from fl_web.facts import release as facts
from fl_web.facts.words import Fact, fact
from protos.fl.v1 import admin_pb2

COLUMNS: dict[str, Callable[[admin_pb2.ReleaseStatus], Cell]] = {
    "Model": lambda release: plain(release.model),
    ">Version": lambda release: str(release.version),
    "State": facts.state_text,
    "Devices": facts.devices_text,
    "Metric": lambda release: plain(facts.metric_text(release)),
    "From": lambda release: plain(facts.round_text(release)),
    "To": lambda release: plain(facts.labels_text(release)),
    "Created": lambda release: units.moment(release.created),
}
_OPTIONAL = ("Created", "To", "From", "Metric")
_SHOWN = len("sha256:") + 12
PACKAGES: dict[str, Callable[[admin_pb2.ReleaseStatus], Cell]] = {
    "Package": lambda release: plain(release.model),
    ">Version": lambda release: str(release.version),
    "State": facts.state_text,
    "Devices": facts.devices_text,
    "Work": lambda release: plain(facts.metric_text(release)),
    "Wheel": lambda release: plain(release.package.version),
    "Digest": lambda release: plain(release.package.digest[:_SHOWN]),
    "Created": lambda release: units.moment(release.created),
}


def releases_table(releases: Sequence[admin_pb2.ReleaseStatus]) -> RenderableType:
    """A row for each release, and the reason below for each that was rolled back."""
    if not releases:
        return Text("no releases yet: `fl release create RUN` makes one")
    return _with_reasons(FittedTable.of(releases, COLUMNS, optional=_OPTIONAL), releases)


def packages_table(releases: Sequence[admin_pb2.ReleaseStatus]) -> RenderableType:
    """The same of packages."""
    if not releases:
        return Text("no packages yet: `fl packages add FILE` releases one")
    return _with_reasons(FittedTable.of(releases, PACKAGES, optional=("Created", "Wheel")), releases)


def _with_reasons(table: FittedTable, releases: Sequence[admin_pb2.ReleaseStatus]) -> RenderableType:
    reasons = [plain(f"{each.model} {each.version}: {each.reason}") for each in releases if each.reason]
    return Group(table, *reasons)


def release_details(
    release: admin_pb2.ReleaseStatus, devices: Sequence[admin_pb2.ReleaseDevice] = ()
) -> RenderableType:
    """A release as names and values, and a table of its devices."""
    package = release.kind == "package"
    what = "package" if package else "model"
    content = ", ".join(release.package.wheels) if package else release.form
    rows: list[tuple[str, Text] | Fact] = [
        (what, plain(f"{release.model}, version {release.version}")),
        ("state", plain(facts.state_text(release))),
        fact("reason", release.reason),
        ("devices", plain(facts.devices_text(release))),
        ("work" if package else "metric", plain(facts.metric_text(release))),
        ("to", plain(facts.labels_text(release))),
        ("of" if package else "from", plain(facts.round_text(release))),
        ("rules", plain(facts.rules_text(release))),
        ("form", plain(f"{content}, {units.size(release.size_bytes)}, blake3:{release.digest}")),
        ("signed by", plain(release.signer)),
        fact("created", release.created),
    ]
    if not devices:
        return fact_grid(rows)
    columns: dict[str, Callable[[admin_pb2.ReleaseDevice], Cell]] = {
        "Device": lambda device: plain(device.client_id),
        "State": lambda device: device.state.replace("_", " ") + (", fell" if device.fell else ""),
        "Metric": lambda device: plain(facts.device_metric(release, device)),
        ">Examples": lambda device: str(device.num_examples or NOTHING),
        "Reported": lambda device: units.moment(device.reported) if device.HasField("reported") else NOTHING,
        "Detail": lambda device: plain(device.detail),
    }
    if package:
        del columns["Metric"], columns[">Examples"]
    optional = [name for name in ("Reported", ">Examples") if name in columns]
    return Group(fact_grid(rows), Text(), FittedTable.of(devices, columns, optional=optional))
