"""Releases for operators and devices: messages into calls of `fl_server.runs.releases`, and back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import grpc.aio

from fl_common.released import Description, check_signature, parse_description
from fl_common.signatures import WrongSignature
from fl_server.errors import InvalidInput, NoSuchRelease, one_line
from fl_server.identity import caller
from fl_server.pages import Cursor, Entries, Position
from fl_server.rounds.releases import Device, DeviceState, Release, Rules
from fl_server.rpc.access import OperatorCalls, require_owner, sees
from fl_server.run.evaluation_metrics import check_values
from fl_server.runs.releases import Kept
from fl_server.store.database.ledger_releases import ReleaseRecord
from fl_tasks.metrics import MAX_METRICS, wrong_name
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import coordinator_pb2
from protos.wire import known_name, timestamp

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
            said.model,
            said.version,
            said.run,
            run.config.owner or "",
            request.description,
            request.signature,
            request.signer,
            time.time(),
            {**asdict(rules), "stages": list(rules.stages)},
        )
        upload = self._services.uploaded.path(str(caller.get()), bytes.fromhex(said.digest), release=True)
        kept = await self._coordinator.releases.create(record, upload)
        return pb.CreateReleaseResponse(release=_status(kept.record, kept.release))

    async def ListReleases(self, request: pb.ListReleasesRequest, context: Context) -> pb.ListReleasesResponse:
        """A page of releases, the newest first. Those that no device is sent any more come without their devices."""
        cursor = Cursor.of_request(request, (float, str, int), "releases", request.model)
        ledger, kept = self._services.ledger, self._coordinator.releases.all()
        here = {(each.record.model, each.record.version): each for each in kept}
        records = {
            (record.created_at, record.model, record.version): record
            for record in await ledger.do(ledger.store.releases)
            if sees(record.owner) and request.model in {"", record.model}
        }

        async def read(after: Position | None, count: int) -> Entries[pb.ReleaseStatus]:
            following = [key for key in sorted(records, reverse=True) if after is None or key < after]
            return [(key, _shown(records[key], here.get(key[1:]))) for key in following[:count]]

        page = await cursor.page(read)
        return pb.ListReleasesResponse(releases=page.entries, next_page_token=page.next_token)

    async def GetRelease(self, request: pb.GetReleaseRequest, context: Context) -> pb.GetReleaseResponse:
        """One release with a page of its devices."""
        record, release = await self._release(request.model, request.version)
        cursor = Cursor.of_request(request, (str,), "release", record.model, record.version)
        ledger = self._services.ledger

        async def read(after: Position | None, count: int) -> Entries[pb.ReleaseDevice]:
            start = after[0] if after else ""
            of = await ledger.do(ledger.store.release_devices, record.model, record.version, start, count)
            return [((client,), _device(release.rules, client, device)) for client, device in of.items()]

        page = await cursor.page(read)
        return pb.GetReleaseResponse(
            release=_status(record, release), devices=page.entries, next_page_token=page.next_token
        )

    async def AdvanceRelease(self, request: pb.AdvanceReleaseRequest, context: Context) -> pb.AdvanceReleaseResponse:
        """Send a release to more devices."""
        kept = self._to_change(request.model, 0)
        share = request.share if request.HasField("share") else None
        if share is not None and not math.isfinite(share):
            raise InvalidInput("share", "a share of at most 1", share)
        await self._coordinator.releases.advance(kept, share)
        return pb.AdvanceReleaseResponse(release=_status(kept.record, kept.release))

    async def RollBackRelease(self, request: pb.RollBackReleaseRequest, context: Context) -> pb.RollBackReleaseResponse:
        """Take a release back."""
        kept = self._to_change(request.model, request.version)
        await self._coordinator.releases.roll_back(kept, request.reason)
        return pb.RollBackReleaseResponse(release=_status(kept.record, kept.release))

    def _to_change(self, model: str, version: int) -> Kept:
        """A release that the caller may change. Raises NoSuchRelease, Forbidden."""
        kept = self._coordinator.releases.find(model, version)
        if not sees(kept.record.owner):
            raise NoSuchRelease(model, version)
        require_owner(kept.record.owner)
        return kept

    async def _release(self, model: str, version: int) -> tuple[ReleaseRecord, Release]:
        """A release that the caller sees, also one that no device is sent any more. Raises NoSuchRelease."""
        ledger = self._services.ledger
        of = [record for record in await ledger.do(ledger.store.releases) if record.model == model]
        found = [record for record in of if version in {0, record.version}]
        if not found or not sees(found[-1].owner):
            raise NoSuchRelease(model, version)
        record = found[-1]
        for kept in self._coordinator.releases.of(model):
            if kept.record.version == record.version:
                return kept.record, kept.release
        return record, record.release(await ledger.do(ledger.store.release_devices, model, record.version))


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
        tuple(said.stages), said.advance_after_s, said.most_failed, said.metric, said.most_drop, said.lower_is_better
    )
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


def _shown(record: ReleaseRecord, kept: Kept | None) -> pb.ReleaseStatus:
    return _status(record, record.release({})) if kept is None else _status(kept.record, kept.release)


def _status(record: ReleaseRecord, release: Release) -> pb.ReleaseStatus:
    """A release as operators see it."""
    said, rules = parse_description(record.description), release.rules
    status = pb.ReleaseStatus(
        model=record.model,
        version=record.version,
        state=release.state,
        reason=release.reason,
        run_id=record.run_id,
        round=said.round,
        form=said.form,
        labels=said.labels,
        signer=record.signer,
        digest=said.digest,
        size_bytes=said.size,
        owner=record.owner,
        created=timestamp(record.created_at),
        rules=pb.ReleaseRules(
            stages=rules.stages,
            advance_after_s=rules.advance_after_s,
            most_failed=rules.most_failed,
            metric=rules.metric,
            most_drop=rules.most_drop,
            lower_is_better=rules.lower_is_better,
        ),
        share=release.share,
        stage_began=timestamp(release.stage_began or record.created_at),
        devices=Counter(device.state.value for device in release.devices.values()),
        fell=sum(map(rules.fell, release.devices.values())),
    )
    before, now = _means(rules.metric, release.devices.values())
    return _with_means(status, before, now)


def _with_means(status: pb.ReleaseStatus, before: float | None, now: float | None) -> pb.ReleaseStatus:
    if before is not None:
        status.metric_before = before
    if now is not None:
        status.metric_now = now
    return status


def _means(metric: str, devices: Iterable[Device]) -> tuple[float | None, float | None]:
    """Means of the metric, before and now, over devices with both; if there are none, over those with the one now."""
    measured = [device for device in devices if metric in device.metrics]
    both = [device for device in measured if metric in device.before]
    return _mean([each.before[metric] for each in both]), _mean([each.metrics[metric] for each in both or measured])


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _device(rules: Rules, client: str, device: Device) -> pb.ReleaseDevice:
    shown = pb.ReleaseDevice(
        client_id=client,
        state=device.state.value,
        detail=device.detail,
        num_examples=device.examples,
        metrics=device.metrics,
        metrics_before=device.before,
        fell=rules.fell(device),
    )
    if device.reported_at is not None:
        shown.reported.CopyFrom(timestamp(device.reported_at))
    return shown
