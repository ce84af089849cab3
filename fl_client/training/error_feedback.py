"""Error feedback: what a sparse encoding left out of a client's updates is added to its next one.

With e_i of the client's last round that counted, it encodes delta_i + e_i, of which the coordinator counts c times the
decoded values, where c is the factor that it clips the delta by:

    e_i+ = delta_i + e_i - c decode(encode(delta_i + e_i))

e_i is a part of the client state, with the outcomes of the client's updates. Without a state it is zero.

Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018, algorithm 1.
"""

from __future__ import annotations

from dataclasses import replace

from algorithms import tree
from algorithms.base import ClientUpdate, Memory, Tensors
from fl_client.errors import WorkFailed
from fl_client.storage.client_state_store import NextState
from protos.encodings import EncodingSpec
from protos.fl.v1 import coordinator_pb2 as pb

SYMBOL = "unsent"
"""The name of e_i in a client state, beside the symbols of the method."""


def unsent_in(state: Memory | None, encoding: EncodingSpec) -> Tensors:
    """e_i of a client state, by the names of the delta's tensors; empty if it is zero, or if there is no feedback."""
    return dict(state.get(SYMBOL, {})) if state is not None and encoding.sparse else {}


def with_unsent(computed: ClientUpdate, unsent: Tensors) -> ClientUpdate:
    """delta_i + e_i in place of the delta. Raises WorkFailed if the state does not fit the model."""
    if not unsent or "delta" not in computed.payloads:
        return computed
    delta = computed.payloads["delta"]
    try:
        tree.check_layout(delta, unsent, "the unsent values in the client state")
    except ValueError as error:
        raise WorkFailed(pb.FAILURE_REASON_STATE_LOST, str(error)) from None
    whole = {name: values + unsent[name].to(values.device) for name, values in delta.items()}
    return replace(computed, payloads={**computed.payloads, "delta": whole})


def added(next_state: NextState | None, sent: ClientUpdate, counted: ClientUpdate) -> NextState | None:
    """The next client state with e_i+.

    sent: with delta_i + e_i. counted: with the values that the coordinator decodes.
    """
    method = NextState({}, {}) if next_state is None else next_state
    whole, decoded = sent.payloads["delta"], counted.payloads["delta"]
    left = {name: values - decoded[name] for name, values in whole.items()}
    return NextState({**method.at_one, SYMBOL: left}, {**method.at_zero, SYMBOL: whole})
