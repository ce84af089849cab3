"""Personal parameters: their names in the model here, and their values in a client state.

The server sends their initial values among the frozen ones. From then on they are trained and kept on this device, as
part of the client state of their run, with the outcomes of its updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from algorithms import tree
from algorithms.base import Memory, Tensors
from algorithms.model_state import personal_names, personal_views
from fl_client.errors import WorkFailed
from fl_client.storage.client_state_store import NextState
from protos.fl.v1 import coordinator_pb2 as pb

SYMBOL = "personal"
"""Their name in a client state, beside the symbols of the method."""


def names_in(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """The personal parameters and buffers of the model. Raises WorkFailed if a pattern does not fit it."""
    try:
        return personal_names(model, patterns) if patterns else frozenset()
    except ValueError as error:
        raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"personal: the model here: {error}") from None


def load(
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
    here, kept = personal_views(model, personal), dict(state.get(SYMBOL, {}))
    try:
        tree.check_layout(here, kept, "the personal values in the client state")
    except ValueError as error:
        raise WorkFailed(reason, str(error)) from None
    for name, tensor in here.items():
        tensor.copy_(kept[name])


def without(state: Memory | None) -> Memory | None:
    """The method's part of a client state."""
    return None if state is None else {symbol: tensors for symbol, tensors in state.items() if symbol != SYMBOL}


def added(next_state: NextState | None, values: Tensors) -> NextState | None:
    """The next client state with these personal values, if there are any. Clipping of a delta does not change them."""
    if not values:
        return next_state
    method = NextState({}, {}) if next_state is None else next_state
    return NextState({**method.at_one, SYMBOL: values}, method.at_zero)
