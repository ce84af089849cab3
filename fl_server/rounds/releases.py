"""Decides about one release, a version of a model or of a package: its devices, its stages, its way back.

No I/O: an event goes in, a state and effects out. A stage has a share of the devices that the release is for: the first
of them in the order of a hash of its name, its version and theirs, so that every process draws the same ones. Who got a
release stays in it. The last stage has all devices, also those that come later.

A release is rolled back when more than a share of its devices refused it, failed, or measured a metric that fell by
more than a limit against the version before. The denominator is all devices that it went to: a device that is off is
neither good nor bad, and the order of reports does not matter. A package is also rolled back when the share of work
that fails with it is larger, by more than a limit, than with the version before it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from fl_server.rounds.events import counted

ENOUGH = 0.5
"""Share of a stage's devices that must have reported before the next stage begins by itself."""
EVERYBODY = 1.0
LEAST_FAILED = 2
"""Work that must have failed with a package before the shares are compared: one failure is no rate."""


class Kind(StrEnum):
    """What is released."""

    MODEL = "model"
    PACKAGE = "package"


class DeviceState(StrEnum):
    """What became of a release on a device. The names are those of the protocol."""

    WAITING = "waiting"
    INSTALLED = "installed"
    EVALUATED = "evaluated"
    NOT_EVALUATED = "not_evaluated"
    REFUSED = "refused"
    FAILED = "failed"
    RETURNED = "returned"


BAD = frozenset({DeviceState.REFUSED, DeviceState.FAILED})
_DONE = BAD | {DeviceState.EVALUATED, DeviceState.NOT_EVALUATED}


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a release."""

    state: DeviceState = DeviceState.WAITING
    detail: str = ""
    examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over its held-out examples, by name."""
    before: Mapping[str, float] = field(default_factory=dict)
    """The same of the version that it had before."""
    reported_at: float | None = None
    """Unix seconds. None: it has not reported."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work that has ended on some devices."""

    ended: int = 0
    failed: int = 0
    """Those that failed, or whose update was refused."""
    devices: int = 0
    """The number of devices that have ended any, without those that refused the package."""

    @property
    def share(self) -> float:
        """The share that failed; 0 without any."""
        return self.failed / self.ended if self.ended else 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.ended + other.ended, self.failed + other.failed, self.devices + other.devices)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which a release goes on and back."""

    stages: tuple[float, ...] = (EVERYBODY,)
    """Shares of the devices, rising; the last one is 1."""
    advance_after_s: float = 0.0
    """Seconds after which the next stage begins by itself. 0: never."""
    most_failed: float = 0.1
    """Largest share of the devices that may be bad."""
    metric: str = ""
    """Empty: no metric counts."""
    most_drop: float = 0.0
    """Largest loss of the metric on a device."""
    lower_is_better: bool = False
    most_rise: float = 0.1
    """Largest rise of the share of failed work, for packages."""

    def problem(self) -> str:
        """What is wrong with the rules; empty if nothing is."""
        stages = self.stages
        if not stages or stages[-1] != EVERYBODY or stages[0] <= 0 or any(a >= b for a, b in pairwise(stages)):
            return f"stages: expected rising shares over 0, the last one 1, got {list(stages)}"
        if not 0 <= self.advance_after_s < math.inf:
            return f"advance_after_s: expected seconds, got {self.advance_after_s}"
        if not 0 <= self.most_failed <= 1:
            return f"most_failed: expected a share from 0 to 1, got {self.most_failed}"
        if not 0 <= self.most_rise <= 1:
            return f"most_rise: expected a share from 0 to 1, got {self.most_rise}"
        if not 0 <= self.most_drop < math.inf:
            return f"most_drop: expected a number that is not negative, got {self.most_drop}"
        return "most_drop: expected a metric with it, got none" if self.most_drop and not self.metric else ""

    def fell(self, device: Device) -> bool:
        """Whether the metric lost more than the rules allow on a device."""
        before, now = device.before.get(self.metric), device.metrics.get(self.metric)
        if device.state is not DeviceState.EVALUATED or not self.metric or before is None:
            return False
        if now is None or not math.isfinite(now):
            return True
        return (now - before if self.lower_is_better else before - now) > self.most_drop


@dataclass(frozen=True, slots=True)
class Release:
    """One version of a model or a package on its way to devices."""

    name: str
    version: int
    rules: Rules
    share: float = 0.0
    """Share of the devices that it goes to now."""
    stage_began: float = 0.0
    """Unix seconds."""
    rolled_back: bool = False
    reason: str = ""
    """Why it was rolled back."""
    devices: Mapping[str, Device] = field(default_factory=dict)
    """Those that it went to, by client id."""
    kind: Kind = Kind.MODEL
    work: Work = Work()
    """What has ended with it, of a package. It is counted anew after a start."""

    @property
    def state(self) -> str:
        """One of "staged", "released" and "rolled_back"."""
        return "rolled_back" if self.rolled_back else "released" if self.share == EVERYBODY else "staged"

    @property
    def next_share(self) -> float | None:
        """The share of the next stage; None after the last one."""
        return next((share for share in self.rules.stages if share > self.share), None)

    def bad(self) -> int:
        """Devices that refused it, failed, or measured too large a loss."""
        return sum(device.state in BAD or self.rules.fell(device) for device in self.devices.values())


# Events.


@dataclass(frozen=True, slots=True)
class StageOpened:
    """A stage begins. targets: all devices that the release is for, as far as they are known."""

    share: float
    targets: Collection[str]
    now: float


@dataclass(frozen=True, slots=True)
class DeviceCame:
    """A device that the release is for has come."""

    client: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A device of the release has reported."""

    client: str
    device: Device


@dataclass(frozen=True, slots=True)
class Returned:
    """A device of a release that was rolled back uses another version."""

    client: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A device was removed from the roster."""

    client: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """An operator takes the release back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    now: float


@dataclass(frozen=True, slots=True)
class WorkCounted:
    """Work was counted. before: with the version before it; None: there is none."""

    work: Work
    before: Work | None


Event = StageOpened | DeviceCame | Reported | Returned | Forgotten | RollBack | Ticked | WorkCounted


# Effects, which are written together before anybody is told.


@dataclass(frozen=True, slots=True)
class Changed:
    """The release itself has changed: `event` and `detail` are for the history."""

    event: str
    detail: str


@dataclass(frozen=True, slots=True)
class DevicesChanged:
    """These devices have changed."""

    clients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell these devices which version they should use now."""

    clients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageDue:
    """The next stage begins: the driver answers with StageOpened."""

    share: float


Effect = Changed | DevicesChanged | Tell | StageDue
Step = tuple[Release, tuple[Effect, ...]]


def advance(release: Release, event: Event) -> Step:
    """The release after an event, and what is to be done. An event without an effect changes nothing."""
    return _RULES[type(event)](release, event)


def _opened(release: Release, event: StageOpened) -> Step:
    if release.rolled_back or event.share <= release.share:
        return release, ()
    release = replace(release, share=event.share, stage_began=event.now)
    released, effects = _added(release, members(release, event.share, event.targets))
    detail = f"{release.name} {release.version}: {share_text(event.share)}, {counted(len(released.devices), 'device')}"
    return released, (Changed(_event(release, "advanced"), detail), *effects)


def _event(release: Release, what: str) -> str:
    return f"{'package' if release.kind is Kind.PACKAGE else 'release'}_{what}"


def members(release: Release, share: float, targets: Collection[str]) -> tuple[str, ...]:
    """The devices of a stage that are not in it yet, in the order of their hashes."""
    ordered = sorted(targets, key=lambda client: _hash(release, client))
    most = math.ceil(round(share * len(ordered), 9))
    return tuple(client for client in ordered[:most] if client not in release.devices)


def _came(release: Release, event: DeviceCame) -> Step:
    wanted = not release.rolled_back and release.share == EVERYBODY and event.client not in release.devices
    return _added(release, (event.client,)) if wanted else (release, ())


def _added(release: Release, clients: tuple[str, ...]) -> Step:
    if not clients:
        return release, ()
    devices = {**release.devices, **dict.fromkeys(clients, Device())}
    return replace(release, devices=devices), (DevicesChanged(clients), Tell(clients))


def _reported(release: Release, event: Reported) -> Step:
    client, device = event.client, event.device
    there = release.devices.get(client)
    if there is None or replace(there, reported_at=device.reported_at) == device:
        return release, ()
    released, changed = _with(release, client, device), (DevicesChanged((client,)),)
    bad, most = released.bad(), released.rules.most_failed
    if release.rolled_back or bad <= most * len(released.devices):
        return released, changed
    why = f"{bad} of {counted(len(released.devices), 'device')} failed or fell, more than {share_text(most)}"
    back, effects = _rolled_back(released, RollBack(why))
    return back, (*changed, *effects)


def _returned(release: Release, event: Returned) -> Step:
    there = release.devices.get(event.client)
    if not release.rolled_back or there is None or there.state is DeviceState.RETURNED:
        return release, ()
    returned = replace(there, state=DeviceState.RETURNED)
    return _with(release, event.client, returned), (DevicesChanged((event.client,)),)


def _forgotten(release: Release, event: Forgotten) -> Step:
    left = {client: device for client, device in release.devices.items() if client != event.client}
    return replace(release, devices=left), ()


def _rolled_back(release: Release, event: RollBack) -> Step:
    if release.rolled_back:
        return release, ()
    detail = f"{release.name} {release.version}: {event.reason}"
    back = replace(release, rolled_back=True, reason=event.reason)
    return back, (Changed(_event(release, "rolled_back"), detail), Tell(tuple(release.devices)))


def _ticked(release: Release, event: Ticked) -> Step:
    """Whether the next stage is due by the rules. A release whose failures rose is rolled back already."""
    rules, share = release.rules, release.next_share
    if release.rolled_back or not rules.advance_after_s or share is None:
        return release, ()
    done = release.work.devices + sum(device.state in _DONE for device in release.devices.values())
    due = event.now >= release.stage_began + rules.advance_after_s and done >= max(1, ENOUGH * len(release.devices))
    return release, (StageDue(share),) if due else ()


def _counted(release: Release, event: WorkCounted) -> Step:
    counted, work, before = replace(release, work=event.work), event.work, event.before
    if release.rolled_back or before is None or work.failed < LEAST_FAILED:
        return counted, ()
    if work.share <= before.share + release.rules.most_rise:
        return counted, ()
    rose = f"rose by more than {share_text(release.rules.most_rise)}"
    counts = f"{work.failed} of {work.ended}, with the version before {before.failed} of {before.ended}"
    return _rolled_back(counted, RollBack(f"failed work {rose}: {counts}"))


_RULES: Mapping[type[Any], Callable[[Release, Any], Step]] = {
    StageOpened: _opened,
    DeviceCame: _came,
    Reported: _reported,
    Returned: _returned,
    Forgotten: _forgotten,
    RollBack: _rolled_back,
    Ticked: _ticked,
    WorkCounted: _counted,
}


def wanted(releases: Iterable[Release], client: str, fits: Mapping[int, bool]) -> int:
    """The version of a model or a package that a device should use; 0: none.

    releases: of one name. fits: by version, whether the release is for this device.
    """
    for release in sorted(releases, key=lambda release: -release.version):
        reached = client in release.devices or release.share == EVERYBODY
        if not release.rolled_back and fits[release.version] and reached:
            return release.version
    return 0


def _with(release: Release, client: str, device: Device) -> Release:
    return replace(release, devices={**release.devices, client: device})


def _hash(release: Release, client: str) -> bytes:
    return hashlib.sha256(f"{release.name}\0{release.version}\0{client}".encode()).digest()


def share_text(share: float) -> str:
    """A share in percent: "12.5%"."""
    return f"{100 * share:.4g}%"
