"""Assignments of clients: the message, and its sending when an attempt opens and when a client comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from google.protobuf.struct_pb2 import Struct

import algorithms as fl
from algorithms.optimizers.spec import RateSchedule
from fl_server.aggregation.methods import (
    learning_rate_in,
    local_in,
    optimizer_spec,
    parameters_in,
    step_schedule,
    update_encoding,
)
from fl_server.aggregation.outgoing import Broadcast
from fl_server.aggregation.privacy import has_centre
from fl_server.rounds import events as ev
from fl_server.rounds.by_client import Work
from fl_server.rounds.sampling import training_seed
from fl_server.rounds.state import STAGES, Phase
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.failures import Deadline
from fl_server.run.secure_stages import SecureStages
from fl_server.run_settings.config import AlgorithmSection, RunConfig
from fl_server.run_settings.sections import LocalSection
from protos.fl.v1 import coordinator_pb2
from protos.fl.v1 import training_pb2 as pb
from protos.fl.v1.tensor_pb2 import Resource
from protos.wire import numbers, payload_kind, payload_name

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What is the same for all clients of a round."""

    run_id: str
    config: RunConfig
    algorithm: fl.Algorithm
    fingerprint: tuple[str, str]
    """(version, source) of the coordinator's task."""
    broadcasts: Sequence[Broadcast]
    max_update_bytes: int
    state_epoch: int = 0
    terms: bytes = b""
    """Those of the secure aggregation of this exchange; empty: updates are sent as they are."""
    local_frozen: Resource | None = None
    """The frozen parameters that clients have themselves. None if they are among the broadcasts, or there are none."""
    clip: float = 0.0
    """C of a round with client-level privacy."""
    rounding: str = ""
    """The rounding of what clients make their states of, in a simulated secure run; empty: they keep none."""


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """The attempt that an assignment belongs to."""

    round: int
    exchange: int
    attempt: int
    seconds_left: float
    """Seconds until the attempt's deadline."""


def for_client(common: pb.Assignment, seed: int, counted: pb.Outcome | None, data: str = "") -> pb.Assignment:
    """The `common_assignment` with what is the client's own: its training seed, its state's outcome and its data."""
    message = pb.Assignment()
    message.CopyFrom(common)
    message.training.seed, message.data = seed, data
    if counted is not None:
        message.counted.CopyFrom(counted)
    return message


def common_assignment(work: RoundWork, position: RoundPosition) -> pb.Assignment:
    """What is the same for all clients of an attempt."""
    payloads, encoding = work.algorithm.exchanges[position.exchange].payloads, update_encoding(work.config)
    message = pb.Assignment(
        key=pb.ExchangeKey(run_id=work.run_id, round=position.round, exchange=position.exchange),
        attempt=position.attempt,
        task=work.config.task.name,
        fingerprint=pb.TaskFingerprint(version=work.fingerprint[0], source=work.fingerprint[1]),
        resources=[broadcast.resource for broadcast in work.broadcasts],
        training=_training(work, position.round),
        payloads=[payload_kind(payload) for payload in payloads],
        payload_names=[name for name in map(payload_name, payloads) if name],
        state_epoch=work.state_epoch,
        upload_encodings=[encoding.wire],
        upload_fraction=encoding.fraction,
        without_direction=work.config.encodings.reference == "direction" or has_centre(work.config, work.algorithm),
        max_update_bytes=work.max_update_bytes,
        personal=work.config.personal,
        local_frozen=work.local_frozen,
        min_accepted=work.config.least,
        clip=work.clip,
        rounding=work.rounding,
    )
    message.deadline.FromMilliseconds(max(0, round(position.seconds_left * 1000)))
    if work.config.secure_aggregation is not None and work.terms:  # in a simulation nothing is masked
        protocol = work.config.secure_aggregation.protocol
        message.secure_aggregation.CopyFrom(pb.SecureAggregation(protocol=protocol, terms=work.terms))
    return message


def _algorithm(section: AlgorithmSection, parameters: Struct) -> pb.AlgorithmSpec:
    spec = pb.AlgorithmSpec(name=section.name, parameters=parameters)
    if section.fingerprint is not None:
        spec.fingerprint.CopyFrom(pb.TaskFingerprint(**dict(section.fingerprint)))
    return spec


_NUMBERS = numbers(pb.LocalTraining()).keys() & LocalSection.model_fields.keys()
"""What a run's file and an assignment have in common. The learning rate is that of the round."""


def _training(work: RoundWork, round_: int) -> pb.LocalTraining:
    local = local_in(work.config, work.algorithm, round_)
    parameters = Struct()
    parameters.update(parameters_in(work.config, work.algorithm, round_))
    given = {name: getattr(local, name) for name in _NUMBERS} | {"learning_rate": learning_rate_in(work.config, round_)}
    training = pb.LocalTraining(
        **given,
        algorithm=_algorithm(work.config.algorithm, parameters),
        population=work.config.population,
        population_examples=work.config.population_examples if work.algorithm.objective == "examples" else 0,
        continue_data=local.continue_data,
    )
    if local.steps:
        training.local_steps = local.steps
    else:
        training.local_epochs = local.epochs or 1
    _set_steps(training, local, step_schedule(work.config, round_))
    if (privacy := work.config.record_privacy) is not None:
        values = privacy.model_dump(include={"unit", "noise_multiplier", "clip", "delta"})
        training.privacy.CopyFrom(pb.LocalPrivacy(**values))
    return training


def _set_steps(training: pb.LocalTraining, local: LocalSection, schedule: RateSchedule) -> None:
    """Optimizer and schedule, only where they differ from plain SGD."""
    spec = optimizer_spec(local)
    if not spec.plain:
        training.optimizer.name, training.optimizer.state = spec.name, spec.state
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.parameters.items()}
        training.optimizer.parameters.update(values)
    if not schedule.constant:
        training.schedule.kind, training.schedule.warmup = schedule.kind, schedule.warmup
        training.schedule_start, training.schedule_steps = schedule.first, schedule.total
        if schedule.end is not None:
            training.schedule.end = schedule.end


BATCH = 16
"""Assignments that are pushed without a pause."""


PAUSE_S, LATE_S, ON_TIME, LONGEST_S = 0.002, 0.001, 4, 1.0
"""The event loop has time if it wakes a task that pauses so many times in a row at most this late; the longest wait."""


_Position = tuple[Phase | None, int, int, int]
"""Phase, round, exchange and attempt."""


class AssignmentDispatch:
    """Sends the assignments of one run. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl, deadline: Deadline, stages: SecureStages) -> None:
        self._context, self._control = context, control
        self._deadline, self._submissions, self._stages = deadline, stages.submissions, stages

    def push_all(self, clients: Sequence[str]) -> None:
        """Send these clients of the cohort their work: the first ones now, the others as fast as the loop keeps up.

        A thousand clients that fetch the model and send their updates at the same time would be a thousand transfers
        in memory, and the event loop would handle hundreds of messages before it comes to anything else.
        """
        if not clients:
            return
        common = self._common(clients[0])
        for client in clients[:BATCH]:
            self._push(common, client)
        if len(clients) > BATCH:
            self._control.spawn(self._push_paced(self._position(clients[0]), clients[BATCH:]))

    async def _push_paced(self, began: _Position, clients: Sequence[str]) -> None:
        """Stops when the attempt is over: the next one pushes to all clients that still work."""
        for first in range(0, len(clients), BATCH):
            await _idle_loop()
            for client in clients[first : first + BATCH]:
                if self._position(client) == began and self._control.state.works(client):
                    self.push(client)

    def _position(self, client: str) -> _Position:
        """Where the client's work belongs. With a buffer other draws come in between, and change nothing for it."""
        state = self._control.state
        if not state.policy.buffered:
            return state.phase, state.round, state.exchange, state.attempt
        work = state.work.get(client, Work(-1, -1))
        return None, work.version, 0, work.attempt

    def push(self, client: str) -> None:
        """Send a client of the cohort its work if it is attached. After a drain the next coordinator sends it."""
        self._push(self._common(client), client)

    def _push(self, common: pb.Assignment, client: str) -> None:
        context, control = self._context, self._control
        if control.draining or not self._stages.drawn:  # all of a cohort that is being written are sent it then
            return
        draw = control.state.attempt if control.state.policy.secure else 0
        seed = training_seed(control.config.seed, common.key.round, client, draw)
        counted, data = context.client_states.counted(client), control.eligible.data_of(client)
        message = for_client(common, seed, counted, data)
        self._submissions.failures.sent(client)
        context.rounds.transfers.assigned(client)
        context.fleet.streams.push(client, coordinator_pb2.AttendResponse(assignment=message))
        self.push_stage(client)

    def push_stage(self, client: str) -> None:
        """Send a client the message of the stage of secure aggregation under way, if there is one."""
        if not self._control.draining and (stage := self._stages.message_for(client)) is not None:
            self._context.fleet.streams.push(client, coordinator_pb2.AttendResponse(stage=stage))

    def _common(self, client: str) -> pb.Assignment:
        """What is the same for all clients of the attempt that the client works for."""
        context, control = self._context, self._control
        _, round_, exchange, attempt = self._position(client)
        version = context.model.version(round_)
        work = RoundWork(
            context.run_id, control.config, context.algorithm, context.fingerprint, version.broadcasts,
            context.services.config.limits.max_update_mib << 20, control.state.state_epoch, self._stages.terms,
            context.model.local_frozen, 0.0 if control.state.policy.secure else version.snapshot.clip,
        )  # fmt: skip
        state = control.state
        # Between two attempts no deadline runs; the next one begins with the whole time.
        collecting = state.policy.buffered or state.phase is Phase.COLLECTING
        left = self._deadline.seconds_of(client) if collecting else control.config.round.deadline_s
        if state.policy.secure:  # the client's answers after its update belong to its work, too
            left = control.config.round.deadline_s + len(STAGES) * state.policy.stage_s
        message = common_assignment(work, RoundPosition(round_, exchange, attempt, left))
        message.traceparent = context.trace.parent_for(state)
        return message

    def client_back(self, client: str) -> None:
        """A client attached again or may train again: send it the work it still has.

        A client that may not train finishes what it began, or reports that it will not. Work that it gave up is not
        sent while it may not train. Work of an attempt that is still to be written is sent when it is.
        """
        state = self._control.state
        if (state.phase is Phase.COLLECTING or state.staged or state.policy.buffered) and state.works(client):
            if client in self._control.unwritten:
                return
            if self._submissions.failures.sent_to_another(client):
                self._control.spawn(self._push_after_restart(client))
            else:
                self.push(client)
        elif state.under_way and client in state.out:
            self._control.spawn(self._return(client))

    async def _push_after_restart(self, client: str) -> None:
        """Another process of a daemon that had its work is here: the core sends it again, or gives it up."""
        failures, control = self._submissions.failures, self._control
        async with control.turn:
            if not control.state.works(client) or not failures.sent_to_another(client):
                return
            await failures.add_restart(client)
            await control.take(ev.ClientRestarted(client))
            if control.state.works(client):
                return
            why = failures.of(client).detail
        self._context.cohort_log.warning("client_failed", run=self._context.run_id, client=client, why=why)
        await failures.count(client, why)

    async def _return(self, client: str) -> None:
        """Expect the client again before it is asked: a failure that it reports at once must be about wanted work."""
        async with self._control.turn:
            await self._control.update_roster()
            event = ev.ClientReturned(client)
            if self._control.applies(event):
                state = self._control.state
                collecting = state.phase is Phase.COLLECTING or state.staged or state.policy.buffered
                await self._control.take(event)
                if collecting:  # else the attempt that begins now has asked it
                    self.push(client)


async def _idle_loop() -> None:
    """Wait until the event loop has time, so that the transfers under way are done first."""
    loop = asyncio.get_running_loop()
    ends, on_time = loop.time() + LONGEST_S, 0
    while on_time < ON_TIME:
        due = loop.time() + PAUSE_S
        await asyncio.sleep(PAUSE_S)
        now = loop.time()
        if now > ends:
            return
        on_time = on_time + 1 if now - due < LATE_S else 0
