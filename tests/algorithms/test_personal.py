"""Personal parameters: their names, their place in a model's state, and their steps with every method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import algorithms as fl
from algorithms.model_state import personal_names, personal_views, state_views
from tests.processes.tiny_task import TiedWeights, batchnorm

RATE, GOAL, STEPS = 0.1, 3.0, 4
OWN = frozenset({"own"})


class TwoParts(nn.Module):
    """Two parts without a common term in the loss: the personal one does not change the gradient of the shared one."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 1, bias=False)
        self.own = nn.Parameter(torch.tensor([0.0, 1.0, 5.0]), requires_grad=trained)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.shared(inputs), self.own


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Squared errors of both parts."""
    return functional.mse_loss(output[0], target) + ((output[1] - GOAL) ** 2).sum()


def answer(method: str, *, personal: bool) -> fl.ClientUpdate:
    """The update of a client with a direction and a state that are not zero."""
    torch.manual_seed(1)
    algorithm = fl.build(method)
    model = TwoParts(trained=personal)
    x = {"shared.weight": torch.full((1, 2), 0.5)}
    model.shared.load_state_dict({"weight": x["shared.weight"]})
    like = {"shared.weight": torch.tensor([[0.3, -0.2]])}
    state = {symbol: {name: tensor + 0.1 for name, tensor in like.items()} for symbol in algorithm.client_init(x)}
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(STEPS)]
    work = fl.Work(
        algorithm,
        fl.ClientContext(like, state),
        fl.LocalSettings(RATE),
        len(algorithm.exchanges) - 1,
        personal=OWN if personal else frozenset(),
    )
    return fl.answer(model, fl.LocalData(batches, batches, loss), work)


@pytest.mark.parametrize("method", [name for name in fl.names() if not fl.build(name).gradient.rho])
def test_personal_parameters_take_plain_steps_with_every_method(method: str) -> None:
    """Payloads are those of a model without them. They descend along g: p - 3 shrinks by 1 - 2 * 0.1 in each step.

    SAM's methods are left out: its norm is over all parameters.
    """
    alone, both = answer(method, personal=False), answer(method, personal=True)
    for payload, tensors in alone.payloads.items():
        assert both.payloads[payload].keys() == tensors.keys() == {"shared.weight"}
        assert torch.equal(both.payloads[payload]["shared.weight"], tensors["shared.weight"])
    expected = GOAL + (torch.tensor([0.0, 1.0, 5.0]) - GOAL) * (1 - 2 * RATE) ** STEPS
    assert both.personal.keys() == {"own"}
    torch.testing.assert_close(both.personal["own"], expected)
    assert alone.personal == {}


def test_the_gradient_of_sam_includes_personal_parameters() -> None:
    """Both parts move, and only the shared one is sent."""
    update = answer("fedsam", personal=True)
    assert update.payloads["delta"].keys() == {"shared.weight"}
    assert not torch.equal(update.personal["own"], torch.tensor([0.0, 1.0, 5.0]))


def test_clipping_and_decay_apply_to_personal_parameters() -> None:
    """A gradient of one norm over all parameters, and wd * p: without a shared gradient the first step is known."""
    model = TwoParts(trained=True)
    batches = [(torch.zeros(1, 2), torch.zeros(1, 1))]
    settings = fl.LocalSettings(RATE, weight_decay=0.5, max_gradient_norm=1.0)
    work = fl.Work(fl.build("fedavg"), fl.ClientContext(), settings, personal=OWN)
    start = model.own.detach().clone()
    came = fl.answer(model, fl.LocalData(batches, batches, loss), work).personal["own"]
    g = 2 * (start - GOAL)
    torch.testing.assert_close(came, start - RATE * (g / (g.norm() + 1e-6) + 0.5 * start))


def test_clipping_after_the_mixing_has_one_norm_over_shared_and_personal_parts() -> None:
    """A step of C = 1 without decay has the length eta_l over both parts together, as in the other order."""
    lengths = []
    for order in ("paper", "feddyn_code"):
        model = TwoParts(trained=True)
        start = torch.cat([parameter.detach().clone().flatten() for parameter in model.parameters()])
        settings = fl.LocalSettings(RATE, max_gradient_norm=1.0)
        work = fl.Work(fl.build("fedavg", order=order), fl.ClientContext(), settings, personal=OWN)
        fl.answer(model, fl.LocalData([(torch.ones(1, 2), torch.full((1, 1), 9.0))], [], loss), work)
        end = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        lengths.append((end - start).norm())
    torch.testing.assert_close(torch.stack(lengths), torch.full((2,), RATE))


def test_personal_values_are_part_of_the_frozen_state() -> None:
    """The trainable part and the buffers are without them, and together the parts have every name once."""
    model = batchnorm()
    personal = personal_names(model, ["1.*"])
    state = state_views(model, personal)
    norms = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert personal == state.frozen.keys() == personal_views(model, personal).keys() == norms
    assert (state.trainable.keys() | state.buffers.keys()) == model.state_dict().keys() - norms


@pytest.mark.parametrize(
    ("patterns", "why"),
    [
        pytest.param(
            ["3.*", "haed.*"], r"'haed\.\*' matches no trainable parameter and no buffer; there are 0\.", id="none"
        ),
        pytest.param(["*"], "match all trainable parameters", id="all"),
        pytest.param(["[0-9].weight", "*.bias"], "match all trainable parameters", id="together"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(patterns: list[str], why: str) -> None:
    """The message has the pattern and the names of the model."""
    with pytest.raises(ValueError, match=why):
        personal_names(batchnorm(), patterns)


def test_a_second_name_of_a_shared_weight_is_refused() -> None:
    """A weight with two names would be personal under one and shared under the other."""
    with pytest.raises(
        ValueError, match=r"matches third\.weight and no pattern first\.weight, which is the same weight"
    ):
        personal_names(TiedWeights(), ["third.*"])
    assert personal_names(TiedWeights(), ["third.*", "first.*"]) == {"first.weight", "first.bias"}


def test_mean_losses_of_epochs_add_up_to_the_training_loss() -> None:
    """Seven steps in epochs of three: the last epoch has one step."""
    model = TwoParts(trained=True)
    batches = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(7)]
    rule, settings = fl.LocalRule(), fl.LocalSettings(RATE)
    result = fl.train_locally(model, batches, loss, rule, settings, fl.LocalOptions(epoch_steps=3))
    means = [epoch["loss"] for epoch in result.epochs]
    assert len(means) == 3
    assert result.loss == pytest.approx((3 * means[0] + 3 * means[1] + means[2]) / 7)
    again = TwoParts(trained=True)
    again.load_state_dict(TwoParts(trained=True).state_dict())
    assert fl.train_locally(again, batches, loss, rule, settings).epochs == ()


def test_a_loop_of_its_own_gives_the_delta_of_the_model() -> None:
    """Whatever the loop does, the delta is the final model minus x; the report's numbers are passed on."""
    model = TwoParts(trained=True)
    x = model.shared.weight.detach().clone()

    def loop() -> fl.LoopReport:
        assert model.training
        with torch.no_grad():
            model.shared.weight.add_(2.0)
            model.own.add_(1.0)
        return fl.LoopReport(steps=5, examples=3, loss=0.5, epochs=({"loss": 0.5},))

    data = replace(fl.LocalData([], [], loss), loop=loop)
    work = fl.Work(fl.build("fedavg"), fl.ClientContext(), fl.LocalSettings(RATE), personal=OWN)
    update = fl.answer(model.eval(), data, work)
    torch.testing.assert_close(update.payloads["delta"]["shared.weight"], torch.full((1, 2), 2.0))
    torch.testing.assert_close(x + 2.0, model.shared.weight.detach())
    assert (update.steps, update.examples, update.loss, update.epochs) == (5, 3, 0.5, ({"loss": 0.5},))
    torch.testing.assert_close(update.personal["own"], torch.tensor([1.0, 2.0, 6.0]))


def test_a_loop_that_freezes_parameters_is_refused() -> None:
    """The model is used again in the next round, so requires_grad is restored."""
    model = TwoParts(trained=True)

    def loop() -> fl.LoopReport:
        model.shared.weight.requires_grad_(False)
        return fl.LoopReport(1, 1, None, ())

    work = fl.Work(fl.build("fedavg"), fl.ClientContext(), fl.LocalSettings(RATE))
    with pytest.raises(ValueError, match=r"requires_grad as it was, got a change of shared\.weight"):
        fl.answer(model, fl.LocalData([], [], loss, loop=loop), work)
    assert model.shared.weight.requires_grad


@pytest.mark.parametrize("method", fl.names())
def test_methods_of_plain_steps_allow_a_loop(method: str) -> None:
    """Plain local SGD with any server optimizer does; the others have a reason, and a few also with inexact."""
    algorithm = fl.build(method)
    plain = {
        "fedavg", "fedavgm", "fedadam", "fedadagrad", "fedyogi", "slowmo", "diloco", "feddemon", "feddemonadam"
    }  # fmt: skip
    never = {"fednova", "mfl", "fedrobust"}
    assert (algorithm.loop_conflict(inexact=False) == "") == (method in plain - never)
    assert (algorithm.loop_conflict(inexact=True) == "") == (method not in never)
