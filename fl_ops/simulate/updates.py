"""The results of clients' work in a simulation, and the admission of updates by the coordinator's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import algorithms as fl
from fl_ops.simulate.engines.engine import Failed, Trained
from fl_ops.simulate.engines.held import TrainedTogether
from fl_server.admission.buffer_rules import buffer_facts
from fl_server.admission.client_rules import Epochs, RegisteredData, UpdateRefused, epochs_of
from fl_server.admission.gate import AdmissionGate, Collecting, build_gate
from fl_server.admission.norms import Measured
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.updates import Source
from fl_server.clients.quarantine import fault_of
from fl_server.rounds.events import Fault
from fl_server.rounds.metrics import ClientMetrics
from fl_tasks.summed_metrics import PlainSum
from protos.codec import digest_bytes
from protos.fl.v1.coordinator_pb2 import FailureReason
from protos.fl.v1.training_pb2 import RefusalReason


@dataclass(frozen=True, slots=True)
class Contribution:
    """One client's admitted update."""

    info: fl.UpdateInfo
    digest: bytes
    training_loss: float | None
    """None if the exchange does not train."""
    update: Source
    """Where its bytes are: in a file, or in memory."""
    norms: Mapping[str, float]
    """Norm of each payload's trainable part and of the buffers' distance, before clipping."""
    epochs: Epochs
    """What the client measured in each local epoch."""

    @property
    def client(self) -> str:
        """The id of the client."""
        return self.info.client_id

    @property
    def measured(self) -> Measured:
        """The norms of its vectors."""
        return Measured(self.info.client_id, self.norms, self.info.clip_factor)


@dataclass(frozen=True, slots=True)
class ClientEvaluation:
    """What a client measured."""

    metrics: ClientMetrics
    sums: Sequence[PlainSum]
    """The sums of the metrics that are no means."""


@dataclass(frozen=True, slots=True)
class NotDelivered:
    """A client whose work failed, or whose update was refused."""

    client: str
    why: str
    not_finite: bool
    """Whether the reason is a value that is not finite."""
    refused: bool = False
    """Whether the update was refused."""
    fault: Fault = ""
    """What was wrong with a refused update."""
    sent: bool = False
    """Whether the refused update was refused for its bytes. A wrong header is refused before they are sent."""
    trace: str = ""
    """The traceback of the task's own code, if that code raised an error."""
    cause: str = ""
    """Type and place of that error."""

    @classmethod
    def of(cls, failed: Failed) -> NotDelivered:
        """The failure that an engine reported."""
        not_finite = failed.reason == FailureReason.FAILURE_REASON_NOT_FINITE
        return cls(failed.client, failed.why, not_finite, trace=failed.trace, cause=failed.cause)


def admit(engine: Engine, collecting: Collecting, trained: Trained) -> Contribution | NotDelivered:
    """Check an update with the coordinator's admission gate."""
    header, update = trained.header, trained.update
    registered = RegisteredData(trained.examples, trained.own_batches)
    gate = build_gate(engine, collecting, trained.client, registered)
    sent = False
    try:
        gate.check_header(header)
        sent = True
        digest = digest_bytes(header.digest)
        if trained.content is None:
            norms = gate.check_file(update, digest, header.num_steps)
        else:
            norms = gate.check_content(update, digest, trained.content)
        clip_factor = gate.clip_factor(next(iter(norms.values())))
    except UpdateRefused as refusal:
        return _refused(trained.client, refusal, sent=sent)
    info = fl.UpdateInfo(trained.client, header.num_examples, header.num_steps, clip_factor)
    loss = header.training_loss if header.HasField("training_loss") else None
    return Contribution(info, digest, loss, update, norms, epochs_of(header))


def admit_together(engine: Engine, collecting: Collecting, done: TrainedTogether) -> list[Contribution | NotDelivered]:
    """Check the updates of clients in lockstep in the same way; what they have in common is checked once.

    Clients with as much data have one gate: what else it knows of a client is needed to decode files.
    """
    alike: dict[RegisteredData, list[int]] = {}
    for number, registered in enumerate(zip(done.examples, done.own_batches, strict=True)):
        alike.setdefault(RegisteredData(*registered), []).append(number)
    shape = engine.shapes[collecting.exchange]
    facts = (
        buffer_facts(
            [done.held.update(number) for number in range(len(done.clients))],
            shape.layout_of("delta").entries,
            collecting.snapshot.buffers,
        )
        if shape.has_buffers
        else None
    )
    results: dict[int, Contribution | NotDelivered] = {}
    for registered, numbers in alike.items():
        gate = build_gate(engine, collecting, done.clients[numbers[0]], registered)
        buffers = None if facts is None else [facts[number] for number in numbers]
        usual = gate.usual_norms([done.held.squares[number] for number in numbers], buffers)
        results.update(zip(numbers, _admitted(gate, done, dict(zip(numbers, usual, strict=True))), strict=True))
    return [results[number] for number in range(len(done.clients))]


def _admitted(
    gate: AdmissionGate, done: TrainedTogether, usual: Mapping[int, Mapping[str, float] | None]
) -> Iterator[Contribution | NotDelivered]:
    """The results of clients with one gate. usual: of each client, by number, as in `usual_norms`."""
    digest, formed = bytes(done.header.digest.value), False
    same_work: tuple[int, Epochs] | None = None
    """Steps and epochs of the client before: those of the next are mostly equal."""
    for number, norms in usual.items():
        client, examples, steps, epochs = (
            done.clients[number], done.examples[number], done.steps[number], done.epochs[number]
        )  # fmt: skip
        update, sent = done.held.update(number), False
        try:
            if (steps, epochs) != same_work:
                gate.check_work(examples, steps, epochs)
                same_work = steps, epochs
            if not formed:
                gate.check_form(done.header)
                formed = True
            sent = True
            checked = gate.check_values(update, done.held.squares[number]) if norms is None else norms
        except UpdateRefused as refusal:
            yield _refused(client, refusal, sent=sent)
            continue
        info = fl.UpdateInfo(client, examples, steps, gate.clip_factor(next(iter(checked.values()))))
        yield Contribution(info, digest, done.losses[number], update, checked, epochs)


def _refused(client: str, refusal: UpdateRefused, *, sent: bool) -> NotDelivered:
    fault = fault_of(RefusalReason.Name(refusal.reason))
    return NotDelivered(client, str(refusal), fault == "not_finite", refused=True, fault=fault, sent=sent)
