"""Releases of models and packages for operators and devices: messages into calls of `staging`, and back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import grpc.aio

from fl_common.packages import Manifest
from fl_common.released import Description, check_signature, parse_description
from fl_common.signatures import WrongSignature
from fl_server.errors import InvalidInput, NoSuchRelease, one_line
from fl_server.identity import caller
from fl_server.pages import Cursor, Entries, Position
from fl_server.rounds.releases import Device, DeviceState, Kind, Release, Rules
from fl_server.rpc.access import OperatorCalls, require_owner, sees
from fl_server.rpc.transfers import digest_in
from fl_server.run.evaluations import check_values
from fl_server.runs.staging import Kept, Staging
from fl_server.store.database.ledger_clients import ReleaseRecord
from fl_tasks.metrics import MAX_METRICS, wrong_name
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import coordinator_pb2
from protos.wire import filled, known_name, timestamp

Context = grpc.aio.ServicerContext[Any, Any]
_DETAIL_CHARS = 1000
_STAGES = 64
_OUTCOME = "RELEASE_OUTCOME_"


class ReleaseCalls(OperatorCalls):
    """The calls about releases."""

    async def CreateRelease(self, request: pb.CreateReleaseRequest, context: Context) -> pb.CreateReleaseResponse:
        """Release a model that the caller has signed and uploaded."""
        said, rules = _checked(request), _rules(request.rules)
        run = self._runs.to_change(said.run)
        if newest := self._coordinator.releases.of(said.model):
            require_owner(newest[0].record.owner)  # a model's versions have one owner
        record = ReleaseRecord(
            Kind.MODEL, said.model, said.version, said.run, run.config.owner or "", request.description,
            request.signature, request.signer, bytes.fromhex(said.digest), time.time(), asdict(rules),
        )  # fmt: skip
        upload = self._services.uploaded.path(str(caller.get()), record.digest, release=True)
        kept = await self._coordinator.releases.create(record, upload)
        return pb.CreateReleaseResponse(release=self._release_status(kept.record, kept.release))

    async def AddPackage(self, request: pb.AddPackageRequest, context: Context) -> pb.AddPackageResponse:
        """Release a package that the caller has uploaded."""
        digest = digest_in(request.digest)
        rules = _rules(request.rules) if request.HasField("rules") else Rules()
        if rules.metric:
            raise InvalidInput("rules.metric", "no metric: devices do not evaluate a package", rules.metric)
        upload = self._services.uploaded.path(str(caller.get()), digest, release=True)
        kept = await self._coordinator.packages.create(upload, digest, rules)
        return pb.AddPackageResponse(release=self._release_status(kept.record, kept.release))

    async def ListReleases(self, request: pb.ListReleasesRequest, context: Context) -> pb.ListReleasesResponse:
        """A page of releases, the newest first. Those that no device is sent any more come without their devices."""
        cursor = Cursor.of_request(request, (float, str, str, int), "releases", request.model, request.kind)
        ledger, records = self._services.ledger, dict[Position, ReleaseRecord]()
        for kind in Kind if not request.kind else (self._staging(request.kind).kind,):
            for record in await ledger.do(ledger.store.releases, kind):
                if sees(record.owner) and request.model in {"", record.name}:
                    records[record.created_at, kind.value, record.name, record.version] = record

        async def read(after: Position | None, count: int) -> Entries[pb.ReleaseStatus]:
            following = [key for key in sorted(records, reverse=True) if after is None or key < after]
            return [(key, self._shown(records[key])) for key in following[:count]]

        page = await cursor.page(read)
        return pb.ListReleasesResponse(releases=page.entries, next_page_token=page.next_token)

    async def GetRelease(self, request: pb.GetReleaseRequest, context: Context) -> pb.GetReleaseResponse:
        """One release with a page of its devices."""
        record, release = await self._release(request.kind, request.model, request.version)
        cursor = Cursor.of_request(request, (str,), "release", record.kind, record.name, record.version)
        ledger = self._services.ledger

        async def read(after: Position | None, count: int) -> Entries[pb.ReleaseDevice]:
            start = after[0] if after else ""
            of = await ledger.do(ledger.store.release_devices, record.kind, record.name, record.version, start, count)
            return [((client,), _device(release.rules, client, device)) for client, device in of.items()]

        page = await cursor.page(read)
        return pb.GetReleaseResponse(
            release=self._release_status(record, release), devices=page.entries, next_page_token=page.next_token
        )

    async def AdvanceRelease(self, request: pb.AdvanceReleaseRequest, context: Context) -> pb.AdvanceReleaseResponse:
        """Send a release to more devices."""
        staging = self._staging(request.kind)
        kept = _to_change(staging, request.model, 0)
        share = request.share if request.HasField("share") else None
        if share is not None and not math.isfinite(share):
            raise InvalidInput("share", "a share of at most 1", share)
        await staging.advance(kept, share)
        return pb.AdvanceReleaseResponse(release=self._release_status(kept.record, kept.release))

    async def RollBackRelease(self, request: pb.RollBackReleaseRequest, context: Context) -> pb.RollBackReleaseResponse:
        """Take a release back."""
        staging = self._staging(request.kind)
        kept = _to_change(staging, request.model, request.version)
        await staging.roll_back(kept, request.reason)
        return pb.RollBackReleaseResponse(release=self._release_status(kept.record, kept.release))

    def _staging(self, kind: str) -> Staging[Any]:
        """The releases of a kind. Raises InvalidInput."""
        stagings: list[Staging[Any]] = [self._coordinator.releases, self._coordinator.packages]
        if (found := next((each for each in stagings if each.kind.value == (kind or Kind.MODEL)), None)) is None:
            raise InvalidInput("kind", " or ".join(Kind), repr(kind[:100]))
        return found

    async def _release(self, kind: str, name: str, version: int) -> tuple[ReleaseRecord, Release]:
        """A release that the caller sees, also one that no device is sent any more. Raises NoSuchRelease."""
        ledger, staging = self._services.ledger, self._staging(kind)
        of = [record for record in await ledger.do(ledger.store.releases, staging.kind) if record.name == name]
        records = [record for record in of if version in {0, record.version}]
        if not records or not sees(records[-1].owner):
            raise NoSuchRelease(name, version, staging.noun)
        if (kept := staging.kept(name, records[-1].version)) is not None:
            return kept.record, kept.release
        devices = await ledger.do(ledger.store.release_devices, staging.kind, name, records[-1].version)
        return records[-1], records[-1].release(devices)

    def _shown(self, record: ReleaseRecord) -> pb.ReleaseStatus:
        kept = self._staging(record.kind).kept(record.name, record.version)
        release = record.release({}) if kept is None else kept.release
        return self._release_status(record if kept is None else kept.record, release)

    def _release_status(self, record: ReleaseRecord, release: Release) -> pb.ReleaseStatus:
        """A release as operators see it."""
        status = _any_status(record, release)
        if record.kind is Kind.PACKAGE:
            manifest = Manifest.model_validate_json(record.description)
            wheels = [wheel.file for wheel in manifest.wheels]
            facts = pb.PackageFacts(version=manifest.version, digest=manifest.digest, wheels=wheels)
            status.size_bytes = manifest.size
            if (kept := self._coordinator.packages.kept(record.name, record.version)) is not None:
                work, before = self._coordinator.packages.counted(kept)
                facts.work.CopyFrom(pb.PackageWork(ended=work.ended, failed=work.failed))
                if before is not None:
                    facts.work_before.CopyFrom(pb.PackageWork(ended=before.ended, failed=before.failed))
            status.package.CopyFrom(facts)
            return status
        said = parse_description(record.description)
        own = pb.ReleaseStatus(round=said.round, form=said.form, labels=said.labels, size_bytes=said.size)
        status.MergeFrom(own)
        return status


def _to_change(staging: Staging[Any], name: str, version: int) -> Kept[Any]:
    """A release that the caller may change. Raises NoSuchRelease, Forbidden."""
    kept = staging.find(name, version)
    if not sees(kept.record.owner):
        raise NoSuchRelease(name, version, staging.noun)
    require_owner(kept.record.owner)
    return kept


def _checked(request: pb.CreateReleaseRequest) -> Description:
    """The description, which is signed by the key that the request names. Raises InvalidInput."""
    try:
        description = parse_description(request.description)
    except ValueError as error:
        raise InvalidInput("description", "the description of a release", error) from error
    try:
        check_signature([request.signer], request.description, request.signature)
    except (WrongSignature, ValueError) as error:
        raise InvalidInput("signature", f"a signature by {request.signer}", error) from error
    return description


def _rules(said: pb.ReleaseRules) -> Rules:
    """The rules of a request. Raises InvalidInput."""
    if len(said.stages) > _STAGES:
        raise InvalidInput("rules.stages", f"at most {_STAGES}", len(said.stages))
    if said.metric and (rule := wrong_name(said.metric)) is not None:
        raise InvalidInput("rules.metric", rule, repr(said.metric[:100]))
    rules = Rules(
        tuple(said.stages), said.advance_after_s, said.most_failed, said.metric, said.most_drop, said.lower_is_better,
        said.most_rise,
    )  # fmt: skip
    if why := rules.problem():
        raise InvalidInput("rules", "usable rules", ValueError(why))
    return rules


def reported_device(said: coordinator_pb2.ReportReleaseRequest) -> Device:
    """What a device reports of a release. Raises InvalidInput."""
    name = known_name(coordinator_pb2.ReleaseOutcome, said.outcome).removeprefix(_OUTCOME).lower()
    if said.outcome == coordinator_pb2.RELEASE_OUTCOME_UNSPECIFIED or name not in set(DeviceState):
        raise InvalidInput("outcome", "a known outcome", said.outcome)
    for field, metrics in (("metrics", said.metrics), ("metrics_before", said.metrics_before)):
        if len(metrics) > MAX_METRICS:
            raise InvalidInput(field, f"at most {MAX_METRICS} metrics", len(metrics))
        check_values(field, metrics)
    if said.outcome == coordinator_pb2.RELEASE_OUTCOME_EVALUATED and not 0 < said.num_examples < 1 << 31:
        raise InvalidInput("num_examples", "more than 0", said.num_examples)
    state, detail = DeviceState(name), one_line(said.detail, _DETAIL_CHARS)
    examples = min(said.num_examples, (1 << 31) - 1)
    return Device(state, detail, examples, dict(said.metrics), dict(said.metrics_before), time.time())


def _any_status(record: ReleaseRecord, release: Release) -> pb.ReleaseStatus:
    """What a release of any kind has."""
    rules = release.rules
    before, now = _means(rules.metric, release.devices.values())
    return pb.ReleaseStatus(
        kind=record.kind.value,
        model=record.name,
        version=record.version,
        state=release.state,
        reason=release.reason,
        run_id=record.run_id,
        signer=record.signer,
        digest=record.digest.hex(),
        owner=record.owner,
        created=timestamp(record.created_at),
        rules=filled(pb.ReleaseRules, rules),
        share=release.share,
        stage_began=timestamp(release.stage_began or record.created_at),
        devices=Counter(device.state.value for device in release.devices.values()),
        fell=sum(map(rules.fell, release.devices.values())),
        metric_before=before,
        metric_now=now,
    )


def _means(metric: str, devices: Iterable[Device]) -> tuple[float | None, float | None]:
    """Means of the metric, before and now, over devices with both; if there are none, over those with the one now."""
    measured = [device for device in devices if metric in device.metrics]
    both = [device for device in measured if metric in device.before]
    return _mean([each.before[metric] for each in both]), _mean([each.metrics[metric] for each in both or measured])


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _device(rules: Rules, client: str, device: Device) -> pb.ReleaseDevice:
    reported = None if device.reported_at is None else timestamp(device.reported_at)
    others = {"num_examples": device.examples, "metrics_before": device.before, "reported": reported}
    return filled(pb.ReleaseDevice, device, client_id=client, fell=rules.fell(device), **others)
