"""What a client keeps: its method's state, error feedback, personal values, and how far it has read its examples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from algorithms import tree
from algorithms.base import Algorithm, ClientUpdate, Memory, Tensors
from algorithms.model_state import personal_names, personal_views, trainable_views
from algorithms.optimizers.spec import PREFIX
from algorithms.optimizers.steps import check_state
from fl_client.errors import WorkFailed, other_layout, state_lost
from fl_client.storage.client_state_store import NextState
from protos.encodings import EncodingSpec
from protos.fl.v1 import coordinator_pb2 as pb

UNSENT = "unsent"
"""The name of e_i in a client state, beside the symbols of the method."""


def unsent_in(state: Memory | None, encoding: EncodingSpec) -> Tensors:
    """e_i of a client state, by the names of the delta's tensors; empty if it is zero, or if there is no feedback."""
    return dict(state.get(UNSENT, {})) if state is not None and encoding.sparse else {}


def with_unsent(computed: ClientUpdate, unsent: Tensors) -> ClientUpdate:
    """delta_i + e_i in place of the delta. Raises WorkFailed if the state does not fit the model."""
    if not unsent or "delta" not in computed.payloads:
        return computed
    delta = computed.payloads["delta"]
    try:
        tree.check_layout(delta, unsent, "the unsent values in the client state")
    except ValueError as error:
        raise state_lost(str(error)) from None
    whole = {name: values + unsent[name].to(values.device) for name, values in delta.items()}
    return replace(computed, payloads={**computed.payloads, "delta": whole})


def with_next_unsent(next_state: NextState | None, sent: ClientUpdate, counted: ClientUpdate) -> NextState | None:
    """The next client state with e_i+.

    sent: with delta_i + e_i. counted: with the values that the coordinator decodes.
    """
    method = NextState({}, {}) if next_state is None else next_state
    whole, decoded = sent.payloads["delta"], counted.payloads["delta"]
    left = {name: values - decoded[name] for name, values in whole.items()}
    return NextState({**method.at_one, UNSENT: left}, {**method.at_zero, UNSENT: whole})


PERSONAL = "personal"
"""The name of personal values in a client state, beside the symbols of the method."""


def personal_in(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """The personal parameters and buffers of the model. Raises WorkFailed if a pattern does not fit it."""
    try:
        return personal_names(model, patterns) if patterns else frozenset()
    except ValueError as error:
        raise other_layout(f"personal: the model here: {error}") from None


def load_personal(
    model: nn.Module,
    personal: frozenset[str],
    state: Memory | None,
    reason: pb.FailureReason = pb.FAILURE_REASON_STATE_LOST,
) -> None:
    """Give the model the personal values of a client state. Without a state it keeps those that it has.

    Raises WorkFailed, with this reason, if the state does not have exactly these values.
    """
    if not personal or state is None:
        return
    here, kept = personal_views(model, personal), dict(state.get(PERSONAL, {}))
    try:
        tree.check_layout(here, kept, "the personal values in the client state")
    except ValueError as error:
        raise WorkFailed(reason, str(error)) from None
    for name, tensor in here.items():
        tensor.copy_(kept[name])


def of_method(state: Memory | None) -> Memory | None:
    """The method's part of a client state."""
    own = {PERSONAL, READER}
    return None if state is None else {symbol: tensors for symbol, tensors in state.items() if symbol not in own}


def with_next_personal(next_state: NextState | None, values: Tensors) -> NextState | None:
    """The next client state with these personal values, if there are any. Clipping of a delta does not change them."""
    if not values:
        return next_state
    method = NextState({}, {}) if next_state is None else next_state
    return NextState({**method.at_one, PERSONAL: values}, method.at_zero)


READER = "reader"
"""The name of a `ReadPosition` in a client state, beside the symbols of the method."""


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far a client has read its examples in a run that continues from round to round."""

    seed: int
    """Seed of the order of all epochs: that of the first round that counted."""
    batches: int
    """Batches that counted."""

    @staticmethod
    def of(state: Memory | None, seed: int) -> ReadPosition:
        """That of a client state; without a state the start of the order of a seed. Raises WorkFailed."""
        kept = None if state is None else state.get(READER)
        if kept is None:
            return ReadPosition(seed, 0)
        try:
            seed, batches = (int(kept[name].item()) for name in ("seed", "batches"))
        except (KeyError, RuntimeError) as error:
            why = f"expected the numbers seed and batches in the client state, got {', '.join(kept) or 'none'}"
            raise state_lost(why) from error
        return ReadPosition(seed % 2**64, batches)

    def after(self, next_state: NextState | None, steps: int) -> NextState:
        """The next client state, with the position after so many more batches."""
        method = NextState({}, {}) if next_state is None else next_state
        signed = self.seed - 2**64 * (self.seed >= 2**63)  # torch's integers are signed
        position = {"seed": torch.tensor(signed), "batches": torch.tensor(self.batches + steps)}
        return NextState({**method.at_one, READER: position}, method.at_zero)


def state_of(
    algorithm: Algorithm, model: nn.Module, client_state: Memory | None, personal: Collection[str] = ()
) -> Memory:
    """The client state, or the method's initial one. Raises WorkFailed for a state that does not fit the model."""
    x, trained = trainable_views(model, personal), trainable_views(model)
    initial = algorithm.client_init(x)
    if client_state is None or not algorithm.keeps_client_state:
        return initial
    try:
        kept = {symbol: client_state.get(symbol, {}) for symbol in initial}
        for symbol, tensors in initial.items():
            tree.check_layout(tensors, kept[symbol], f"client state {symbol}")
        check_state({symbol: it for symbol, it in client_state.items() if symbol.startswith(PREFIX)}, trained)
    except ValueError as error:
        raise state_lost(str(error)) from None
    return {**client_state, **kept}
