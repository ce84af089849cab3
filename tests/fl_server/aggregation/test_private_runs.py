"""A run with differential privacy is refused at its creation if its clients would send more than noise covers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fl_server.admission.client_rules import wrong_privacy
from fl_server.aggregation.engine import Engine
from fl_server.errors import InvalidInput
from fl_server.run.assignments import RoundPosition, RoundWork, common_assignment
from fl_server.run_settings.privacy import PrivacySection
from fl_server.run_settings.spec import from_spec, from_values, to_spec
from protos.fl.v1.training_pb2 import AppliedPrivacy, LocalPrivacy, UpdateHeader

PRIVACY: dict[str, Any] = {"unit": "record", "noise_multiplier": 1.5, "clip": 0.5, "delta": 1e-5}
LINEAR: Any = SimpleNamespace(model=lambda: nn.Linear(1, 1))
NORMED: Any = SimpleNamespace(model=lambda: nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
LOOP: Any = SimpleNamespace(model=lambda: nn.Linear(1, 1), train=lambda model, data, context: None)


def engine(name: str = "fedcm", task: Any = LINEAR, **sections: Any) -> Engine:
    """A run with privacy."""
    parameters = sections.pop("parameters", {})
    values = {"task": {"name": "one"}, "algorithm": {"name": name, "parameters": parameters}, "privacy": PRIVACY}
    return Engine(from_values({**values, **sections}), task)


def test_the_section_travels_to_the_clients() -> None:
    """File, wire and assignment have the same values."""
    made = engine()
    assert from_spec(to_spec(made.config)) == made.config
    work = RoundWork("r", made.config, made.algorithm, ("1", "sha256:ab"), (), 0)
    assert common_assignment(work, RoundPosition(0, 0, 0, 1.0)).training.privacy == LocalPrivacy(**PRIVACY)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"name": "fedsam"}, "algorithm.name: .*ascent step depends on the whole batch, without noise"),
    ({"name": "mime"}, "algorithm.name: .*it sends a gradient of all local examples, without noise"),
    ({"name": "mimelite"}, "algorithm.name: .*it sends a gradient of all local examples, without noise"),
    ({"name": "scaffold", "population": 9}, "algorithm.name: .*keeps a state from round to round"),
    ({"name": "feddyn", "population": 9}, "algorithm.name: .*keeps a state from round to round"),
    ({"name": "fedavg"}, 'algorithm.parameters: expected weights = "uniform"'),
    ({"personal": ["bias"]}, "personal: expected none with .privacy.: personal parts are trained without noise"),
    ({"local": {"max_gradient_norm": 1.0}}, "local.max_gradient_norm: expected 0 with .privacy."),
    ({"evaluation": {"clients_every": 2}}, "evaluation.clients_every: expected 0 with .privacy."),
    ({"task": NORMED}, "task: expected a model without batch norm .*use torch.nn.GroupNorm, got batch norm at '1'"),
    ({"task": LOOP}, "privacy: expected none for a task with a training loop of its own"),
    ({"privacy": {**PRIVACY, "max_epsilon": 3.0}}, "privacy: expected neither max_epsilon nor account"),
    ({"privacy": {**PRIVACY, "noise_multiplier": 0}}, "privacy.noise_multiplier"),
    ({"privacy": {**PRIVACY, "delta": 1}}, "privacy.delta"),
    ({"privacy": {"unit": "record"}}, "privacy.noise_multiplier: expected a value"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_cannot_be_private_is_refused(sections: dict[str, Any], message: str) -> None:
    """The error names the field, and what helps."""
    with pytest.raises(InvalidInput, match=message):
        engine(**sections)


def test_methods_with_uniform_weights_are_accepted() -> None:
    """FedAvg weighs by examples unless it is told otherwise."""
    assert engine("fedavg", parameters={"weights": "uniform"}).config.privacy is not None


@pytest.mark.parametrize(
    ("came", "wrong"),
    [
        ({}, ""),
        ({"noise_multiplier": 2.0, "delta": 1e-6}, ""),
        ({"noise_multiplier": 1.4}, "or better, got 'record', 1.4"),
        ({"clip": 0.6}, "clip 0.5 and delta 1e-05 or better"),
        ({"delta": 1e-4}, "or better"),
        ({"unit": "client"}, "of the unit record"),
    ],
)
def test_an_update_with_less_privacy_is_refused(came: dict[str, Any], wrong: str) -> None:
    """A client may apply more, and says so."""
    applied = AppliedPrivacy(applied=LocalPrivacy(**{**PRIVACY, **came}))
    found = wrong_privacy(PrivacySection(**PRIVACY), UpdateHeader(privacy=applied))
    assert (wrong in found) if wrong else not found


def test_an_update_without_a_statement_is_refused() -> None:
    """A client that does not know the field has trained without noise."""
    assert "states no privacy" in wrong_privacy(PrivacySection(**PRIVACY), UpdateHeader())
