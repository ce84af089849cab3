"""The site's policy in a running daemon: judges coordinators and assignments, and shapes what a registration says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import structlog
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from algorithms.base import Exchange
from fl_client.errors import PolicyChanged, PolicyRefused, Untrusted, WorkFailed, unsupported
from fl_client.gates.availability import AvailabilityMonitor
from fl_client.monitoring.metrics import Metrics
from fl_client.policy.budget import NAMES, Amounts, Budget, OverBudget
from fl_client.policy.config import Policy, trusted_certificates
from fl_client.policy.file import InForce, PolicyFile
from fl_client.policy.peers import trust_of_clients
from fl_client.policy.rules import UNKNOWN_WORK, OrderedWork, Request, ShardSize, refusal, work_of
from fl_common.certificates.pem import fingerprints
from fl_common.secure_aggregation.signatures import Trust
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2

_OF_MODEL = (tensor_pb2.RESOURCE_KIND_MODEL, tensor_pb2.RESOURCE_KIND_FROZEN)
_SHOWN = 5
"""Unknown fields that a message names."""


def ordered_work(training: training_pb2.LocalTraining, exchange: Exchange, shard: ShardSize) -> OrderedWork:
    """The work of an assignment whose values were checked: of what the exchange of its method makes clients do."""
    by_epochs = training.WhichOneof("work") == "local_epochs"
    amount = {"epochs": training.local_epochs} if by_epochs else {"steps": training.local_steps}
    return work_of(shard, training.batch_size, **amount, passes=exchange.passes, trains=exchange.trains)


def training_request(assignment: training_pb2.Assignment, work: OrderedWork | None) -> Request:
    """The request of an assignment. work: by `ordered_work`; None: only its names are judged."""
    training = assignment.training
    return Request(
        kind="names" if work is None else "training",
        task=assignment.task,
        source=assignment.fingerprint.source,
        algorithm=training.algorithm.name,
        optimizer=training.optimizer.name or "sgd",
        work=work or UNKNOWN_WORK,
        min_clients=assignment.min_accepted,
        model_bytes=_model_bytes(assignment),
        unknown=unknown_fields(assignment),
        privacy=training.privacy.unit if training.HasField("privacy") else None,
        secure=assignment.HasField("secure_aggregation"),
    )


def evaluation_request(assignment: training_pb2.EvaluationAssignment) -> Request:
    """The request of an evaluation."""
    return Request(
        kind="evaluation",
        task=assignment.task,
        source=assignment.fingerprint.source,
        model_bytes=_model_bytes(assignment),
        unknown=unknown_fields(assignment),
    )


def bytes_down(resources: Iterable[tensor_pb2.Resource]) -> int:
    """Bytes of all resources of an assignment."""
    return sum(resource.size_bytes for resource in resources)


def bytes_up(assignment: training_pb2.Assignment) -> int:
    """Bytes of the update, as far as they are known before the training: one model for each payload."""
    model = sum(
        resource.size_bytes for resource in assignment.resources if resource.kind == tensor_pb2.RESOURCE_KIND_MODEL
    )
    return model * len(assignment.payloads)


def unknown_fields(message: Message) -> str:
    """The unknown fields of a message and of all messages in it, by path and number; empty if there are none."""
    unknown = list(_unknown(message, message.DESCRIPTOR.name))
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return ", ".join(unknown[:_SHOWN]) + more


def _unknown(message: Message, path: str) -> Iterator[str]:
    fields = UnknownFieldSet(message)
    yield from (f"{path}.{fields[index].field_number}" for index in range(len(fields)))
    for field, value in message.ListFields():
        for inner in _messages(value):
            yield from _unknown(inner, f"{path}.{field.name}")


def _messages(value: Any) -> Iterable[Message]:
    """The messages in a field's value: one, a list, or the values of a map."""
    if isinstance(value, Message):
        return (value,)
    if isinstance(value, str | bytes | int | float):
        return ()
    items = value.values() if hasattr(value, "values") else value
    return (member for member in items if isinstance(member, Message))


def _model_bytes(assignment: training_pb2.Assignment | training_pb2.EvaluationAssignment) -> int:
    """The bytes of the model, with the frozen parameters that are sent and those that the device has itself."""
    sent = sum(resource.size_bytes for resource in assignment.resources if resource.kind in _OF_MODEL)
    return sent + assignment.local_frozen.size_bytes


log = structlog.get_logger()


class SitePolicy:
    """The rules of a site and the day's budget. Lives on the event loop."""

    def __init__(self, file: PolicyFile, budget: Budget, metrics: Metrics, availability: AvailabilityMonitor) -> None:
        self._file, self.budget, self._metrics, self._availability = file, budget, metrics, availability
        self._version = self._told = file.now.version
        """Version that the daemon follows; and the one that the coordinator was last judged or registered with by."""

    @property
    def policy(self) -> Policy:
        """The rules in force."""
        return self._file.now.policy

    async def run(self) -> None:
        """Follow the file and the day until cancelled."""
        while self._file.path is not None:
            self.show_budget()
            await asyncio.sleep(self._file.check_s)
            await self._refresh()
            await self.budget.save()

    async def until_changed(self) -> None:
        """Wait for another policy. Raises PolicyChanged: what is registered may be against the new rules."""
        if self._file.path is None:
            await asyncio.get_running_loop().create_future()
        while self._file.now.version == self._told:
            await asyncio.sleep(self._file.check_s)
            await self._refresh()
        raise PolicyChanged("the site's policy file has changed")

    async def _refresh(self) -> None:
        await asyncio.to_thread(self._file.refresh)
        if self._file.now.version != self._version:
            self._version = self._file.now.version
            self.budget.rules_changed()
            self.show_budget()
            await self._availability.check()

    def show_budget(self) -> None:
        """Report what is used of the day, and whether that forbids work."""
        used = self.budget.used
        for name in NAMES:
            self._metrics.day_used.labels(name).set(getattr(used, name))
        self._availability.set_budget(self.budget.closed())

    # Coordinators.

    def trusted_ca(self, bundle: bytes | None) -> bytes | None:
        """The certificates of a CA bundle in PEM that the policy trusts. Raises Untrusted if there are none."""
        now = self._file.now
        pins = now.policy.coordinators.ca_sha256
        if pins is None:
            return bundle
        if bundle is None:
            raise self._untrusted(now, "coordinators.ca_sha256 needs TLS: add [tls] to the settings")
        if trusted := trusted_certificates(bundle, pins):
            return trusted
        theirs = ", ".join(fingerprints(bundle)[:5])
        raise self._untrusted(now, f"no certificate of tls.ca is in coordinators.ca_sha256; theirs: {theirs}")

    def trust_of_clients(self, bundle: bytes | None) -> Trust:
        """Whose keys are those of other clients, in secure aggregation. Raises WorkFailed if there is no authority.

        bundle: authorities of the coordinator's certificate, which it may hold itself.
        """
        try:
            trust = trust_of_clients(self.policy.secure_aggregation, bundle)
        except (OSError, ValueError) as error:
            raise WorkFailed(
                pb.FAILURE_REASON_POLICY, f"policy: secure_aggregation: expected an authority in PEM: {error}"
            ) from error
        if trust is not None:
            return trust
        expected = "expected [tls] in this device's settings, or an authority in its policy"
        raise unsupported(f"secure aggregation: {expected}")

    def check_coordinator(self, response: pb.RegisterResponse) -> None:
        """Raises Untrusted for a coordinator with another id."""
        now = self._file.now
        allowed = now.policy.coordinators.ids
        if allowed is not None and response.coordinator_id not in allowed:
            got = response.coordinator_id[:64]
            raise self._untrusted(now, f"the coordinator's id {got!r} is not in coordinators.ids")

    def _untrusted(self, now: InForce, message: str) -> Untrusted:
        """Count a refusal. The next change of the policy ends the wait for the next try."""
        self._told = now.version
        self._metrics.policy_refusals.labels("coordinators").inc()
        return Untrusted(f"policy: coordinators: {message}")

    def registration(self, request: pb.RegisterRequest) -> pb.RegisterRequest:
        """A registration without what the policy does not share. The request is changed."""
        now = self._file.now
        self._told, share = now.version, now.policy.share
        if not share.labels:
            request.labels.clear()
        if not share.device:
            request.ClearField("device")
        if not share.privacy:
            request.ClearField("privacy_resets")
        if not share.evaluations:
            for offer in request.tasks:
                offer.eval_examples = 0
        return request

    # Assignments.

    async def check_names(self, assignment: training_pb2.Assignment) -> None:
        """Raises PolicyRefused for a task or a method that is not allowed, before the method is made."""
        await self._judge(training_request(assignment, None))

    async def check_training(self, assignment: training_pb2.Assignment, work: OrderedWork) -> None:
        """Raises PolicyRefused, before anything is fetched."""
        await self._judge(training_request(assignment, work))

    async def begin_training(self, assignment: training_pb2.Assignment, work: OrderedWork) -> None:
        """Count an assignment that begins now. Raises PolicyRefused if the day's budget has no room for it."""
        down, up = bytes_down(assignment.resources), bytes_up(assignment)
        await self._charge(Amounts(1, work.steps or 0, work.examples or 0, 0.0, down, up))

    async def check_evaluation(self, assignment: training_pb2.EvaluationAssignment) -> None:
        """Check an evaluation as `check_training` checks training."""
        await self._judge(evaluation_request(assignment))

    async def begin_evaluation(self, assignment: training_pb2.EvaluationAssignment, examples: int) -> None:
        """Begin an evaluation as `begin_training` begins training. examples: of this device's held-out part."""
        await self._charge(Amounts(1, 0, examples, 0.0, bytes_down(assignment.resources)))

    def received(self, count: int) -> None:
        """Count tensor bytes that arrived. Raises PolicyRefused beyond the day's limit."""
        self._metrics.bytes_received(count)
        try:
            self.budget.received(count)
        except OverBudget as over:
            raise self.refused("day", str(over)) from None

    def sent(self, count: int) -> None:
        """Count tensor bytes that were sent."""
        self._metrics.bytes_sent(count)
        self.budget.sent(count)

    def check_sending(self, count: int) -> None:
        """Raises PolicyRefused if this many tensor bytes may not be sent today."""
        try:
            self.budget.check(Amounts(bytes_up=count), ["bytes_up"])
        except OverBudget as over:
            raise self.refused("day", str(over)) from None

    def out_of_time(self) -> PolicyRefused:
        """The error of work that was ended because no seconds of the day are left."""
        return self.refused("day", f"day.max_seconds is {self.policy.day.max_seconds:g}, and the work took longer")

    async def _judge(self, request: Request) -> None:
        await self._refresh()
        if self._file.now.problem:
            raise WorkFailed(pb.FAILURE_REASON_STOPPED, "the site's policy file cannot be used")
        if (verdict := refusal(self.policy, request)) is not None:
            raise self.refused(verdict.rule, verdict.text)

    async def _charge(self, need: Amounts) -> None:
        try:
            await self.budget.charge(need)
        except OverBudget as over:
            raise self.refused("day", str(over)) from None
        self.show_budget()

    def refused(self, rule: str, text: str) -> PolicyRefused:
        """Count and log a refusal."""
        self._metrics.policy_refusals.labels(rule).inc()
        if rule == "day":
            self.show_budget()  # before the refusal is reported: the two reports travel together
        log.warning("policy_refused", rule=rule, reason=text)
        return PolicyRefused(rule, text)
