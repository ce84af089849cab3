"""Simulated runs whose updates, model and direction travel in encodings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from algorithms.base import ClientUpdate, Tensors
from algorithms.reference import KnownPart
from fl_client.training import client_states
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.simulation import Simulation
from fl_server.errors import InvalidInput
from tests.fl_ops.simulate.conftest import Simulated
from tests.marks import slow_except

ALL = {"update": "int8", "model": "bf16", "direction": "int8"}
PARAMETERS = 4 * 3 + 3
STATES = {"scaffold": ("c", "c_i"), "feddyn": ("h", "h_i")}
"""Names of the server's state and of the clients' states."""


def digests(simulated: Simulated, engine: EngineOptions = SEQUENTIAL, **sections: Any) -> list[str | None]:
    """Digest of the model after each round."""
    with simulated(engine, **sections) as simulation:
        found = [done.digest for done in simulation.rounds()]
        assert simulation.ending is not None
        assert simulation.ending[0] == "completed", simulation.failures
        return found


ENGINES = {
    "sequential": SEQUENTIAL,
    "workers": EngineOptions(workers=2),
    "batched": EngineOptions(batched=BatchedOptions(strategy="one_by_one", group=2)),
}
REFERENCES: dict[str, dict[str, Any]] = {
    "delta": {},
    "reference": {"reference": "direction"},
    "sparse": {"update": "topk", "fraction": 0.3, "reference": "direction"},
}


@pytest.mark.parametrize(
    ("engine", "method", "reference"),
    slow_except(
        product(("workers", "batched"), ("fedcm", "scaffold"), REFERENCES),
        ("batched", "scaffold", "reference"),
        ("batched", "fedcm", "delta"),  # the only one of them whose rule multiplies two factors of a client
    ),
)
def test_engines_have_the_same_bits(simulated: Simulated, engine: str, method: str, reference: str) -> None:
    """Workers, and clients whose updates would stay in memory without an encoding, as one client after the other."""
    encodings = {**ALL, **REFERENCES[reference]}
    sections: dict[str, Any] = {"algorithm": {"name": method}, "population": 4, "encodings": encodings}
    alone, plain = digests(simulated, **sections), digests(simulated, **{**sections, "encodings": {}})
    assert digests(simulated, ENGINES[engine], **sections) == alone != plain


def test_the_bytes_are_those_of_the_encodings(simulated: Simulated) -> None:
    """Of two clients: int8 has a scale of four bytes for each of two tensors, and the second begins after four."""
    with simulated(encodings={"update": "int8", "model": "bf16"}, algorithm={"name": "fedavg"}) as simulation:
        [first, *_] = simulation.rounds()
    assert (first.bytes_up, first.bytes_down) == (2 * (16 + 4 + 3), 2 * 2 * PARAMETERS)


@pytest.mark.parametrize(
    ("engine", "encoding"),
    slow_except(
        product(ENGINES, ("plain", "bf16", "int8")),
        ("sequential", "int8"),
        ("batched", "bf16"),
    ),
)
def test_differences_change_only_the_bytes(simulated: Simulated, engine: str, encoding: str) -> None:
    """Models and results are the same. From the second round on, clients that took part before get fewer bytes."""
    sections: dict[str, Any] = {
        "task": {"name": "points:NormedPoints"},
        "round": {"clients_per_round": 4},
        "local": {"learning_rate": 0.01},
    }
    rounds = []
    for difference in ("none", "previous"):
        encodings = {"model": encoding, "direction": encoding, "difference": difference}
        with simulated(ENGINES[engine], **sections, encodings=encodings) as simulation:
            rounds.append([replace(done, seconds=0.0) for done in simulation.rounds()])
    whole, fewer = rounds
    assert [replace(done, bytes_down=0) for done in fewer] == [replace(done, bytes_down=0) for done in whole]
    assert whole[0].bytes_down == fewer[0].bytes_down
    assert all(less.bytes_down < more.bytes_down for less, more in zip(fewer[1:], whole[1:], strict=True))


def mean_state(simulation: Simulation, symbol: str) -> dict[str, torch.Tensor]:
    """Mean of the client states over the population of four; a client without one has zeros."""
    federation = simulation.federation
    kept = [state[symbol] for client in federation.clients if (state := federation.states.get(client)) is not None]
    assert len(kept) > 2
    return {name: torch.stack([each[name] for each in kept]).sum(dim=0) / 4 for name in kept[0]}


ENCODINGS: dict[str, dict[str, Any]] = {
    "int8": {"update": "int8"},
    "int4": {"update": "int4", "model": "int8", "direction": "int4"},
    "eden1": {"update": "eden1"},
    "topk": {"update": "topk", "fraction": 0.3},
}


@pytest.mark.parametrize(
    ("method", "reference", "encoding"),
    slow_except(
        [
            (*each, encoding)
            for each in (("scaffold", "delta"), ("scaffold", "reference"), ("feddyn", "delta"))
            for encoding in ENCODINGS
        ],
        ("scaffold", "delta", "int8"),
        ("scaffold", "reference", "topk"),
    ),
)
def test_the_server_s_state_is_the_mean_of_the_clients_states(
    simulated: Simulated, method: str, reference: str, encoding: str
) -> None:
    """After every round, with clipped deltas: clients compute their states from the values that the server adds."""
    shared, own = STATES[method]
    sections: dict[str, Any] = {"algorithm": {"name": method}, "population": 4, "stop": {"rounds": 6}}
    sections["encodings"] = {**ENCODINGS[encoding], **REFERENCES[reference]}
    with simulated(**sections, round={"clip_update_norm": 0.05}) as simulation:
        for done in simulation.rounds():
            if done.round < 3:
                continue
            server = simulation.federation.snapshot.state.memory[shared]
            assert max(float(tensor.abs().max()) for tensor in server.values()) > 1e-4
            torch.testing.assert_close(dict(server), mean_state(simulation, own), rtol=1e-4, atol=1e-6)


def test_option_one_of_scaffold_has_the_mean_too(simulated: Simulated) -> None:
    """Its clients send the change of their variates, which is encoded too."""
    algorithm = {"name": "scaffold", "parameters": {"option": "I"}}
    with simulated(algorithm=algorithm, population=4, encodings={"update": "int4"}, stop={"rounds": 5}) as simulation:
        list(simulation.rounds())
        server = simulation.federation.snapshot.state.memory["c"]
        torch.testing.assert_close(dict(server), mean_state(simulation, "c_i"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("update", ["int2", "eden1", "topk"])
def test_the_averaged_state_of_an_optimizer_stays_plain(simulated: Simulated, update: str) -> None:
    """Adam's second moment would have zeros, and steps of any length. In lockstep the bits are the same."""
    sections = {
        "encodings": {"update": update, **({"fraction": 0.2} if update == "topk" else {})},
        "local": {"optimizer": {"name": "adam", "state": "server"}, "learning_rate": 0.01},
        "algorithm": {"name": "fedavg"},
    }
    with simulated(**sections) as simulation:
        rounds = list(simulation.rounds())
        for symbol, tensors in simulation.federation.snapshot.state.memory.items():
            if symbol.endswith("_sq"):
                assert all(bool((tensor >= 0).all()) for tensor in tensors.values())
    assert all(done.metrics["loss"] < 2 for done in rounds)
    assert rounds[0].bytes_up > 2 * 2 * 4 * PARAMETERS


@pytest.mark.parametrize(
    ("update", "clip"), slow_except(product(("topk", "randk"), (0.0, 0.05)), ("topk", 0.05), ("randk", 0.0))
)
def test_nothing_of_a_delta_is_lost(
    simulated: Simulated, update: str, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error feedback: what the server added in all rounds and what clients still keep is the sum of all deltas.

    A clipped part is kept, too.
    """
    deltas: list[dict[str, torch.Tensor]] = []
    whole = client_states.with_unsent

    def watched(computed: ClientUpdate, unsent: Tensors) -> ClientUpdate:
        deltas.append({name: tensor.clone() for name, tensor in computed.payloads["delta"].items()})
        return whole(computed, unsent)

    monkeypatch.setattr(client_states, "with_unsent", watched)
    sections: dict[str, Any] = {
        "algorithm": {"name": "fedavg", "parameters": {"weights": "uniform"}},
        "round": {"clients_per_round": 4, "clip_update_norm": clip},
        "stop": {"rounds": 5},
        "encodings": {"update": update, "fraction": 0.2},
    }
    with simulated(**sections) as simulation:
        first = {name: tensor.clone() for name, tensor in simulation.snapshot.state.x.items()}
        list(simulation.rounds())
        kept = mean_state(simulation, client_states.UNSENT)
        for name, tensor in simulation.snapshot.state.x.items():
            assert float(kept[name].norm()) > 1e-3
            sums = torch.stack([delta[name] for delta in deltas]).sum(dim=0) / 4
            torch.testing.assert_close(tensor - first[name] + kept[name], sums, rtol=1e-4, atol=1e-5)


def test_sparse_updates_need_a_mean(simulated: Simulated) -> None:
    """A median of values that are mostly 0 is 0."""
    encodings = {"update": "topk", "fraction": 0.1}
    with (
        pytest.raises(InvalidInput, match='round.reducer: expected "mean" with encodings.update = "topk"'),
        simulated(
            encodings=encodings,
            algorithm={"name": "fedavg"},
            round={"reducer": "median", "clients_per_round": 3, "quorum": 3},
        ),
    ):
        pass


@pytest.mark.parametrize(
    "method", slow_except(["fedcm", "mofedsam", "mimelite", "mime", "qg", "mfl", "scaffold"], "fedcm", "mime")
)
def test_a_reference_without_loss_changes_only_the_rounding(
    simulated: Simulated, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All values are sent, without the steps along the direction, and the server adds these back."""
    sections: dict[str, Any] = {
        "algorithm": {"name": method},
        "population": 4,
        "stop": {"rounds": 4},
        "local": {"schedule": {"kind": "cosine"}, "inexact": True},
    }
    added: list[str] = []
    add = KnownPart.added_to_part

    def watched(self: KnownPart, values: torch.Tensor, name: str, start: int) -> torch.Tensor:
        added.append(name)
        return add(self, values, name, start)

    monkeypatch.setattr(KnownPart, "added_to_part", watched)
    models = []
    for encodings in ({}, {"update": "topk", "fraction": 1.0, "reference": "direction"}):
        with simulated(**sections, encodings=encodings) as simulation:
            list(simulation.rounds())
            models.append(simulation.model())
    torch.testing.assert_close(models[1], models[0], rtol=1e-5, atol=1e-6)
    assert set(added) == set(models[0])


@pytest.mark.slow
def test_a_reference_makes_residuals_shorter(simulated: Simulated) -> None:
    """What int2 loses is in proportion to what is encoded: FedCM with a small share of local gradients."""
    sections: dict[str, Any] = {
        "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.05}},
        "round": {"clients_per_round": 4},
        "stop": {"rounds": 8},
    }
    models = []
    for encodings in ({}, {"update": "int2"}, {"update": "int2", "reference": "direction"}):
        with simulated(**sections, encodings=encodings) as simulation:
            list(simulation.rounds())
            models.append(simulation.model())
    without, with_reference = (
        sum(float((model[name] - models[0][name]).norm()) for name in models[0]) for model in models[1:]
    )
    assert with_reference < without


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        pytest.param({"algorithm": {"name": "fedavg"}}, "whose clients add no direction", id="fedavg"),
        pytest.param({"algorithm": {"name": "feddyn"}, "population": 4}, "whose clients add no direction", id="feddyn"),
        pytest.param({"encodings": {"reference": "direction"}}, 'with update = "plain"', id="plain"),
        pytest.param({"local": {"optimizer": {"name": "adam"}, "inexact": True}}, "plain SGD steps", id="adam"),
        pytest.param(
            {"algorithm": {"name": "scaffold", "parameters": {"objective": "examples"}}, "population": 4},
            'objective = "examples"',
            id="examples",
        ),
    ],
)
def test_a_reference_that_cannot_be_is_refused(simulated: Simulated, sections: dict[str, Any], expected: str) -> None:
    """Before the run begins, with the key."""
    encodings = {"update": "int8", "reference": "direction"}
    with (
        pytest.raises(InvalidInput, match=f"encodings.reference: expected .*{expected}"),
        simulated(**{"encodings": encodings, **sections}),
    ):
        pass


def test_neutral_encodings_change_nothing(simulated: Simulated) -> None:
    """All values of a block, and "plain" by name, are the plain run."""
    plain = digests(simulated)
    assert digests(simulated, encodings={"update": "topk", "fraction": 1.0}) == plain
    assert digests(simulated, encodings={"update": "plain", "model": "plain"}) == plain
