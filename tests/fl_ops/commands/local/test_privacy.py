"""`fl privacy`: costs and noise of a run's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fl_common.privacy.accountant import Mechanism, epsilon_of
from fl_common.privacy.loss_distributions import tight_epsilon_of
from tests.fl_ops.conftest import Fl
from tests.marks import slow_except

RUN = """
population = 1000
task = {{ name = "digits" }}
round = {{ sampling = "bernoulli", rate = 0.05 }}
stop = {{ rounds = 60 }}
[privacy]
unit = "client"
noise_multiplier = {noise}
clip = 0.1
delta = 1e-4
max_epsilon = {budget}
"""


def epsilon(noise: float, rounds: int) -> float:
    """What so many rounds cost."""
    return epsilon_of({Mechanism(noise, 0.05): rounds}, 1e-4)


@pytest.mark.parametrize(("noise", "budget"), slow_except([(1.0, 4.0), (0.5, 4.0), (4.0, 300.0)], (4.0, 300.0)))
def test_costs_and_least_noise(fl: Fl, tmp_path: Path, noise: float, budget: float) -> None:
    """The least noise is within the budget, and one percent less is not; one round more than the most is not either."""
    (tmp_path / "run.toml").write_text(RUN.format(noise=noise, budget=budget))
    facts = json.loads(fl("privacy", "run.toml", "--json").stdout)
    assert facts["epsilon"] == pytest.approx(epsilon(noise, 60))
    tight = tight_epsilon_of({Mechanism(noise, 0.05): 60}, 1e-4)
    assert facts["tight_epsilon"] == tight < facts["epsilon"]
    least, most = facts["least_noise_multiplier"], facts["most_rounds"]
    assert epsilon(least, 60) <= budget < epsilon(0.99 * least, 60)
    assert epsilon(noise, most) <= budget < epsilon(noise, most + 1)
    text = fl("privacy", "run.toml").stdout
    assert f"60 rounds at rate 0.05 with noise {noise:g}: epsilon" in text
    assert f"By dp-accounting's privacy loss distributions it is {tight:.3g}." in text
    assert f"The least noise for 60 rounds within it is {least:.3g}." in text


RECORD = """
algorithm = { name = "fedavg", parameters = { weights = "uniform" } }
[privacy]
unit = "record"
noise_multiplier = 1.0
clip = 0.5
delta = 1e-5
"""


@pytest.mark.parametrize("sections", ["", RECORD], ids=["none", "of records"])
def test_a_file_without_privacy_of_clients(fl: Fl, tmp_path: Path, sections: str) -> None:
    """The message names the section and its page, and who knows what records cost."""
    (tmp_path / "run.toml").write_text('task = { name = "digits" }\n' + sections)
    result = fl("privacy", "run.toml")
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert 'expected the section [privacy] with unit = "client" (docs/security/privacy.md)' in message
    assert "`fl-client privacy`" in message
