"""The second accountant: under the first one, over the exact value, and never needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_common.privacy import loss_distributions
from fl_common.privacy.accountant import Mechanism, epsilon_of
from fl_common.privacy.loss_distributions import MOST, is_installed, tight_epsilon_of
from tests.fl_common.privacy.test_accountant import CASES
from tests.marks import slow_except
from tests.processes import forks


@pytest.mark.parametrize(("z", "q", "steps", "delta", "rdp", "pld"), slow_except(CASES, CASES[0], CASES[3]))
def test_epsilon_is_that_of_privacy_loss_distributions(
    z: float, q: float, steps: int, delta: float, rdp: float, pld: float
) -> None:
    """Wider intervals than the library's cost less than a percent; the first accountant's epsilon is larger."""
    tight = tight_epsilon_of({Mechanism(z, q): steps}, delta)
    assert tight is not None
    assert pld * 0.9999 <= tight <= pld * 1.01
    assert tight <= epsilon_of({Mechanism(z, q): steps}, delta)


@pytest.mark.parametrize(
    ("z", "q", "steps", "delta"), slow_except([case[:4] for case in CASES], CASES[0][:4], CASES[3][:4])
)
def test_the_first_accountant_recomputed(z: float, q: float, steps: int, delta: float) -> None:
    """The library's own Renyi divergences are at more orders; ours are at most a tenth over them."""
    rdp = pytest.importorskip("dp_accounting.rdp", reason="the extra privacy is not installed")
    events = pytest.importorskip("dp_accounting")
    accountant, noise = rdp.RdpAccountant(), events.GaussianDpEvent(z)
    accountant.compose(noise if q == 1.0 else events.PoissonSampledDpEvent(q, noise), steps)
    again = accountant.get_epsilon(delta)
    assert again * 0.9999 <= epsilon_of({Mechanism(z, q): steps}, delta) <= again * 1.1


def test_mechanisms_add_up() -> None:
    """Runs of one account have other noise and rates; nothing spent is nothing."""
    one, two = Mechanism(1.0, 0.05), Mechanism(2.0, 1.0)
    both = tight_epsilon_of({one: 100, two: 5, Mechanism(9.0, 0.1): 0}, 1e-5)
    alone = [tight_epsilon_of({mechanism: steps}, 1e-5) for mechanism, steps in ((one, 100), (two, 5))]
    assert both is not None
    assert all(value is not None and value < both for value in alone)
    assert both < epsilon_of({one: 100, two: 5}, 1e-5)
    assert tight_epsilon_of({}, 1e-5) == 0.0


def test_an_epsilon_that_protects_nobody_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would need gigabytes of memory."""
    monkeypatch.delattr(loss_distributions, "_epsilon")
    assert epsilon_of({Mechanism(0.05, 0.4): 3}, 0.01) > MOST
    assert tight_epsilon_of({Mechanism(0.05, 0.4): 3}, 0.01) is None


def test_without_the_extra_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first accountant's number is shown alone."""
    monkeypatch.setattr(loss_distributions, "find_spec", lambda name: None)
    assert not is_installed()
    assert tight_epsilon_of({Mechanism(1.0, 0.1): 10}, 1e-5) is None


def test_it_is_not_imported_before_the_first_question(tmp_path: Path) -> None:
    """Nor torch's compiler: starts of programs, and of each process of a task, would take two seconds longer."""
    result = tmp_path / "early"
    text = "str(sys.modules['tests.processes.preloaded'].EARLY)"
    program = f"import pathlib, sys; pathlib.Path({str(result)!r}).write_text({text})"
    process = forks.context().Process(target=exec, args=(program,))
    process.start()
    process.join()
    assert (process.exitcode, result.read_text()) == (0, "[]")
