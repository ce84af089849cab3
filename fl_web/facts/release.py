"""What the terminal and the page say of a release: its devices by state, its rules, its metric or failed work."""

from __future__ import annotations

from typing import Literal

from fl_common.units import NOTHING, measured
from protos.fl.v1 import admin_pb2 as pb

STATES = ("waiting", "installed", "evaluated", "not_evaluated", "refused", "failed", "returned")


def share_text(share: float) -> str:
    """A share in percent: "12.5%"."""
    return f"{100 * share:.4g}%"


def devices_text(release: pb.ReleaseStatus) -> str:
    """Devices by state: "18 evaluated, 1 waiting, 1 refused; 2 fell"."""
    counts = [f"{release.devices[name]} {name.replace('_', ' ')}" for name in STATES if release.devices.get(name)]
    fell = f"; {release.fell} fell" if release.fell else ""
    return ", ".join(counts) + fell or NOTHING


def state_text(release: pb.ReleaseStatus) -> str:
    """Its state in words: "staged, 10%"."""
    state = release.state.replace("_", " ")
    return f"{state}, {share_text(release.share)}" if release.state == "staged" else state


def metric_text(release: pb.ReleaseStatus) -> str:
    """The metric's means: "accuracy 91.20 % -> 93.00 %"; of a package the failed work: "0 of 40 -> 3 of 12 failed"."""
    if release.kind == "package":
        return f"{_work(release, 'work_before', ' -> ')}{_work(release, 'work', ' failed')}" or NOTHING
    if not release.HasField("metric_now"):
        return NOTHING
    name = release.rules.metric
    before = f"{measured(release.metric_before, name)} -> " if release.HasField("metric_before") else ""
    return f"{name} {before}{measured(release.metric_now, name)}"


def _work(release: pb.ReleaseStatus, which: Literal["work", "work_before"], end: str) -> str:
    work: pb.PackageWork = getattr(release.package, which)
    return f"{work.failed:,} of {work.ended:,}{end}" if release.package.HasField(which) else ""


def rules_text(release: pb.ReleaseStatus) -> str:
    """Its rules on one line."""
    rules = release.rules
    stages = ", ".join(map(share_text, rules.stages))
    on = f"by itself after {rules.advance_after_s:g} s" if rules.advance_after_s else "by hand"
    drop = f", or if {rules.metric} gets worse by more than {rules.most_drop:g} there" if rules.metric else ""
    if release.kind == "package":
        drop = f", or if more of its work fails than before, by more than {share_text(rules.most_rise)}"
    return f"stages {stages}, {on}; back if more than {share_text(rules.most_failed)} fail{drop}"


def labels_text(release: pb.ReleaseStatus) -> str:
    """The labels of its devices: "site=north"."""
    return ", ".join(f"{key}={value}" for key, value in sorted(release.labels.items())) or "all devices"


def round_text(release: pb.ReleaseStatus) -> str:
    """Where it is from: "digits-1, round 12"; of a package what it is: "1.2, sha256:3f9a4c..."."""
    if release.kind == "package":
        return f"{release.package.version}, {release.package.digest}"
    where = f"round {release.round}" if release.HasField("round") else "first model"
    return f"{release.run_id}, {where}"


def device_metric(release: pb.ReleaseStatus, device: pb.ReleaseDevice) -> str:
    """The metric on a device: "accuracy 91.20 % -> 93.00 %"."""
    name = release.rules.metric or next(iter(sorted(device.metrics)), "")
    if name not in device.metrics:
        return NOTHING
    before = f"{measured(device.metrics_before[name], name)} -> " if name in device.metrics_before else ""
    return f"{name} {before}{measured(device.metrics[name], name)}"
