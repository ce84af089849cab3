"""A whole round in one process, for every method: the state before it and the clients' data in, the state after it out.

Several exchanges, client states and buffers are included. The bits are those of a coordinator with the same clients,
data and settings; `fl simulate` is that coordinator in one process. The updates of a round are in memory together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from algorithms.aggregate import Update, average_buffers, omega, sum_exchange
from algorithms.base import (
    Algorithm,
    ClientContext,
    ClientUpdate,
    LocalSettings,
    Memory,
    RoundInfo,
    ServerState,
    Tensors,
    UpdateInfo,
)
from algorithms.client import LocalData, Work, answer
from algorithms.model_state import ModelState, load_state, read_state
from algorithms.optimizers.federated import averaged_state


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that passes from round to round, of server and clients."""

    server: ServerState
    buffers: Tensors = field(default_factory=dict)
    """Values of the model's buffers."""
    clients: Mapping[str, Memory] = field(default_factory=dict)
    """Client states by client id. A client that is not here has the method's initial state."""


@dataclass(frozen=True, slots=True)
class Participant:
    """A client that takes part in a round."""

    client_id: str
    num_examples: int
    """n_i; greater than 0."""
    data: Callable[[int], LocalData]
    """Exchange, from 0 -> the client's data. Called just before its work, so that it may seed torch's generators."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round."""

    state: RunState
    losses: Mapping[str, float]
    """Mean loss of each client's local steps, by client id."""


def start_run(algorithm: Algorithm, model: nn.Module) -> RunState:
    """The state before round 0, from the model's values."""
    values = read_state(model)
    return RunState(algorithm.init(values.trainable), values.buffers)


def run_round(  # noqa: PLR0913, PLR0917 - a round has this many inputs
    algorithm: Algorithm,
    state: RunState,
    model: nn.Module,
    participants: Sequence[Participant],
    settings: LocalSettings,
    round_info: RoundInfo,
) -> RoundResult:
    """Let the participants work one after the other, and apply their updates. `state` is not changed.

    Args:
        algorithm: of `build` or `compose`.
        state: of the round before, or of `start_run`.
        model: all participants train in it; its frozen parameters are kept, its other values replaced. `load_state`
            loads a state into it.
        participants: the cohort, in any order.
        settings: of the local steps.
        round_info: the round, with the same learning rate, and with the facts that the method needs. `cohort_size` is
            filled in.

    Raises:
        AlgorithmError: the method cannot work with these inputs.
        ValueError: no or repeated participants, two learning rates, a client without batches, or a missing fact.
    """
    _check(participants, settings, round_info)
    round_info = replace(round_info, cohort_size=len(participants))
    cohort = sorted(participants, key=lambda client: client.client_id.encode())
    frozen, sums, answers = read_state(model).frozen, dict[str, Tensors](), list[_Answer]()
    averaged = averaged_state(algorithm, state.server, round_info.round)
    for number, exchange in enumerate(algorithm.exchanges):
        direction, answers = exchange.direction(state.server, sums), []
        for client in cohort:
            known = state.clients.get(client.client_id)
            memory = algorithm.client_init(state.server.x) if known is None else known
            weight = omega(algorithm.objective, UpdateInfo(client.client_id, client.num_examples, 1), round_info)
            context = ClientContext(direction, memory, weight, averaged)
            load_state(model, ModelState(state.server.x, state.buffers, frozen))
            update = answer(model, client.data(number), Work(algorithm, context, settings, number))
            info = UpdateInfo(client.client_id, client.num_examples, update.steps)
            answers.append(_Answer(info, context, update))
        sums |= sum_exchange(exchange, [answered.sent for answered in answers], round_info)
    return RoundResult(
        RunState(
            algorithm.server_step(state.server, sums, round_info),
            _next_buffers(algorithm, state.buffers, answers),
            {**state.clients, **_next_client_states(algorithm, answers)},
        ),
        {answered.info.client_id: answered.update.loss for answered in answers if answered.update.loss is not None},
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """One client's part in an exchange."""

    info: UpdateInfo
    context: ClientContext
    update: ClientUpdate

    @property
    def sent(self) -> Update:
        return self.info, self.update.payloads


def _check(participants: Sequence[Participant], settings: LocalSettings, round_info: RoundInfo) -> None:
    if not participants:
        raise ValueError("expected at least one participant, got none; a round without updates changes nothing")
    counts = Counter(client.client_id for client in participants)
    if repeated := sorted(client for client, count in counts.items() if count > 1):
        raise ValueError(f"expected each client once, got {', '.join(repeated)} more than once")
    if settings.learning_rate != round_info.learning_rate:
        raise ValueError(
            "expected one learning rate in the settings of the local steps and in the round's facts, got "
            f"{settings.learning_rate:g} and {round_info.learning_rate:g}"
        )


def _next_buffers(algorithm: Algorithm, before: Tensors, answers: Sequence[_Answer]) -> Tensors:
    if not before:
        return before
    weights = algorithm.weights([answered.info for answered in answers])
    return average_buffers([answered.update.buffers for answered in answers], weights)


def _next_client_states(algorithm: Algorithm, answers: Sequence[_Answer]) -> dict[str, Memory]:
    if not algorithm.keeps_client_state:
        return {}
    return {
        answered.info.client_id: algorithm.next_client_state(answered.context, answered.update) for answered in answers
    }
