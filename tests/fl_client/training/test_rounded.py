"""A device's numbers: several payloads in one masked update, none of which shares a mask, a rotation or a rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.base import ClientUpdate
from fl_client.errors import WorkFailed
from fl_client.training.rounded import as_summed, rounded_update
from fl_common.secure_aggregation.rounding import RoundedPayload, Rounding
from fl_common.secure_aggregation.terms import Place, Terms
from protos.fl.v1 import training_pb2
from tests.fl_common.secure_aggregation.federation import Federation, Values, names, terms_of

VALUES = 40
DELTA = {"w": torch.linspace(-1.0, 2.0, VALUES)}
TWICE = (RoundedPayload("delta", 4.0), RoundedPayload("delta", 4.0, per_step=True))


def rounding_of(*payloads: RoundedPayload) -> Rounding:
    """A rounding with 12 bits, in which weights by steps begin at 2."""
    return Rounding(12, "ab" * 32, payloads, min_steps=2)


def assignment_of(rounding: Rounding, values: int) -> training_pb2.Assignment:
    """The work of a round."""
    made = training_pb2.Assignment(training=training_pb2.LocalTraining(seed=5))
    terms = Terms(Place("run", 0), 0, names(3), values, 16, 3, quantizer=rounding.to_text())
    made.secure_aggregation.terms = terms.to_bytes()
    return made


def update_of(steps: int = 2, **payloads: dict[str, torch.Tensor]) -> ClientUpdate:
    """What training gave."""
    return ClientUpdate({"delta": DELTA, **payloads}, {}, steps, 0.1)


def numbers_of(rounding: Rounding, computed: ClientUpdate) -> list[Values]:
    """The numbers of each payload."""
    update, _ = rounded_update(assignment_of(rounding, VALUES * len(rounding.payloads)), computed, 3, keeps=False)
    return [np.frombuffer(piece, np.int32) for piece in update.pieces]


def test_a_payload_that_is_summed_twice_has_other_numbers() -> None:
    """With the same weight, too: rotation and rounding are of the place in the update."""
    first, second = numbers_of(rounding_of(*TWICE), update_of(steps=2))
    assert (first != second).mean() > 0.9


def test_a_weight_by_steps_scales_the_numbers() -> None:
    """A client with eight steps has a quarter of the numbers of one with two; one with a single step counts as two."""
    of_steps = [np.linalg.norm(numbers_of(rounding_of(*TWICE), update_of(steps))[1]) for steps in (1, 2, 8)]
    assert of_steps[0] == of_steps[1]
    assert of_steps[2] == pytest.approx(of_steps[1] / 4, rel=0.05)


def test_the_summed_values_are_those_of_the_numbers() -> None:
    """Each payload as the coordinator counts it: clipped, on the steps of its own range. A simulation has the same."""
    rounding = rounding_of(RoundedPayload("delta", 1.5), RoundedPayload("full_gradient", 100.0))
    computed = update_of(full_gradient={"w": 9.0 * DELTA["w"]})
    assignment = assignment_of(rounding, 2 * VALUES)
    _, counted = rounded_update(assignment, computed, 3, keeps=True)
    norm = float(DELTA["w"].norm())
    assert torch.allclose(counted.payloads["delta"]["w"], DELTA["w"] * 1.5 / norm, atol=2e-3)
    assert torch.allclose(counted.payloads["full_gradient"]["w"], 9.0 * DELTA["w"], atol=0.1)
    assignment.rounding = rounding.to_text()
    again = as_summed(assignment, computed, 3)
    for name, payload in counted.payloads.items():
        assert torch.equal(payload["w"], again.payloads[name]["w"])


def test_terms_for_other_payloads_are_refused() -> None:
    """The device's method sends two, and the terms sum one."""
    with pytest.raises(WorkFailed, match="expected terms with the payloads delta, full_gradient, got delta"):
        rounded_update(assignment_of(rounding_of(TWICE[0]), VALUES), update_of(full_gradient=DELTA), 3, keeps=True)


def test_no_mask_is_used_for_two_payloads() -> None:
    """Two payloads of zeros are masked with other numbers."""
    terms = terms_of(3, values=2 * VALUES)
    federation = Federation(terms)
    federation.until("signatures", {}, {client: np.zeros(2 * VALUES, np.int32) for client in terms.cohort})
    for masked in federation.updates.values():
        first, second = (np.frombuffer(masked, "<u2", VALUES, 2 * VALUES * part) for part in (0, 1))
        assert (first != second).mean() > 0.9
