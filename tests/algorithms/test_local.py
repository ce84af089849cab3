"""The local loop: the order inside a step, in numbers worked by hand, and its refusals."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl


class Line(nn.Module):
    """y * input, with y as given, and a second parameter that the loss does not reach."""

    def __init__(self, y: float, unused: float = 2.0) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.tensor([y]))
        self.unused = nn.Parameter(torch.tensor([unused]))

    def forward(self, inputs: Tensor) -> Tensor:
        """[n] -> [n]."""
        return self.y * inputs


def mean_product(output: Tensor, target: Tensor) -> Tensor:
    """A loss with the gradient mean(input * target) in y, for every y."""
    return (output * target).mean()


def slope(g: float) -> tuple[Tensor, Tensor]:
    """A batch on which the gradient in y is g."""
    return torch.tensor([1.0]), torch.tensor([g])


def train(
    model: nn.Module, gradients: Sequence[float], rule: fl.LocalRule | None = None, **settings: Any
) -> fl.LocalResult:
    """Steps of known gradients at rate 0.5, if no other is given."""
    all_settings = fl.LocalSettings(**{"learning_rate": 0.5, **settings})
    return fl.train_locally(model, [slope(g) for g in gradients], mean_product, rule or fl.LocalRule(), all_settings)


def u(y: float, unused: float = 0.0) -> fl.Tensors:
    """A direction for a Line."""
    return {"y": torch.tensor([y]), "unused": torch.tensor([unused])}


def test_delta_is_new_minus_old() -> None:
    """Gradients 1 and 3 at rate 0.5: delta = -0.5 * (1 + 3) = -2, on the model too."""
    model = Line(10.0)
    result = train(model, [1.0, 3.0])
    assert (result.delta["y"].item(), model.y.item(), result.steps) == (-2.0, 8.0, 2)


def test_rule_by_hand() -> None:
    """a = 0.5, u = 3, mu = 2, gradient 4, rate 0.5, from x = 1.

    Step 1: d = 0.5 * 4 + 3 + 2 * 0 = 5, y = 1 - 2.5 = -1.5.  Step 2: d = 2 + 3 + 2 * -2.5 = 0, y = -1.5.
    """
    result = train(Line(1.0), [4.0, 4.0], fl.LocalRule(a=0.5, u=u(3.0), mu=2.0))
    assert result.delta["y"].item() == -2.5


def test_zero_direction_changes_nothing() -> None:
    """u = 0, with or without a proximal term, equals no u, bit for bit, for numbers that are not exact."""
    for rule in (fl.LocalRule(mu=0.3), fl.LocalRule(), fl.LocalRule(a=0.7, mu=0.3), fl.LocalRule(a=0.7)):
        plain, zero = (train(Line(0.1), [0.7, 0.9, 1.1], local_rule) for local_rule in (rule, replace(rule, u=u(0.0))))
        assert torch.equal(plain.delta["y"], zero.delta["y"])


def test_inputs_and_results_stay_unchanged() -> None:
    """Directions and local momentum keep their values, and a result is not overwritten by the next training."""
    direction, momentum, model = u(3.0), u(1.0), Line(1.0)
    given = fl.LocalRule(0.5, direction, 2.0, v=momentum, gamma=0.5)
    first = train(model, [4.0, 3.0], given)
    assert first.v is not None
    kept = first.delta["y"].item(), first.v["y"].item()
    train(model, [1.0, 2.0], given)
    assert (direction["y"].item(), momentum["y"].item()) == (3.0, 1.0)
    assert (first.delta["y"].item(), first.v["y"].item()) == kept


def test_decay_is_inside_the_gradient() -> None:
    """Gradient 4, decay 0.5 * y = 1 at y = 2, a = 0.5: d = 0.5 * (4 + 1) = 2.5, not 0.5 * 4 + 1 = 3."""
    assert train(Line(2.0), [4.0], fl.LocalRule(a=0.5), weight_decay=0.5).delta["y"].item() == -1.25


def test_clipping_comes_before_decay() -> None:
    """Gradient 4 clipped at 1, then decay 0.5 * 2 = 1: d = 2 and delta = -1."""
    assert train(Line(2.0), [4.0], weight_decay=0.5, max_gradient_norm=1.0).delta["y"].item() == pytest.approx(-1.0)


def test_clipping_divides_by_norm_and_a_little() -> None:
    """Gradient 1e-6 at limit 1e-6: min(1, C / (||g|| + 1e-6)) = 1/2, so delta = -0.5 * 5e-7 from y = 0."""
    assert train(Line(0.0), [1e-6], max_gradient_norm=1e-6).delta["y"].item() == pytest.approx(-2.5e-7)


def test_short_gradients_are_not_clipped() -> None:
    """A gradient within the limit is used as it is, bit for bit."""
    assert train(Line(2.0), [0.3], max_gradient_norm=1.0).delta == train(Line(2.0), [0.3]).delta


def test_clipping_takes_one_norm_over_all_parameters() -> None:
    """Gradients 3 and 4 have norm 5, so at limit 2.5 both are halved: deltas -0.75 and -1 at rate 0.5."""

    class Pair(Line):
        def forward(self, inputs: Tensor) -> Tensor:
            return 3 * self.y * inputs + 4 * self.unused * inputs

    delta = train(Pair(0.0), [1.0], max_gradient_norm=2.5).delta
    assert (delta["y"].item(), delta["unused"].item()) == pytest.approx((-0.75, -1.0))


def test_parameter_without_gradient_counts_as_zero_gradient() -> None:
    """The loss never reaches `unused` = 2: decay 0.5 * 2 and u = 3 still act, delta = -0.5 * (1 + 3) = -2."""
    assert train(Line(1.0), [1.0], fl.LocalRule(u=u(0.0, 3.0)), weight_decay=0.5).delta["unused"].item() == -2.0
    assert train(Line(1.0), [1.0]).delta["unused"].item() == 0.0


def test_frozen_parameters_stay_and_have_no_delta() -> None:
    """A parameter without requires_grad is neither moved nor decayed."""
    model = Line(1.0)
    model.unused.requires_grad_(False)
    assert list(train(model, [1.0], weight_decay=0.5).delta) == ["y"]
    assert model.unused.item() == 2.0


def test_parameters_may_share_the_memory_of_a_gradient() -> None:
    """y.view(1) + unused.view(1): autograd gives both one gradient, 4; each is halved once, delta = -0.5 * 2 = -1."""

    class Sum(Line):
        def forward(self, inputs: Tensor) -> Tensor:
            return (self.y.view(1) + self.unused.view(1)) * inputs

    delta = train(Sum(1.0), [4.0], fl.LocalRule(a=0.5)).delta
    assert (delta["y"].item(), delta["unused"].item()) == (-1.0, -1.0)


def test_sparse_gradients_train_like_dense_ones() -> None:
    """An embedding with sparse gradients, decay and clipping gives the delta of a dense one."""
    torch.manual_seed(0)
    dense, sparse = (nn.Embedding(5, 2, sparse=flag) for flag in (False, True))
    fl.load_state(sparse, fl.read_state(dense))
    batch, settings = (torch.tensor([1, 3, 3]), torch.zeros(3, 2)), fl.LocalSettings(0.1, 0.01, 0.5)
    deltas = [
        fl.train_locally(m, [batch] * 2, nn.functional.mse_loss, fl.LocalRule(), settings).delta
        for m in (dense, sparse)
    ]
    torch.testing.assert_close(*deltas, rtol=0, atol=1e-7)


DYN = fl.GradientRule(order="feddyn_code")


def test_order_of_the_feddyn_program_by_hand() -> None:
    """Gradient 4, a = 0.5, u = 2: mixture 4, clipped at 1; then decay 0.5 * 2 = 1, outside of the mixture: d = 2."""
    rule = fl.LocalRule(a=0.5, u=u(2.0), gradient=DYN)
    delta = train(Line(2.0), [4.0], rule, weight_decay=0.5, max_gradient_norm=1.0).delta["y"].item()
    assert delta == pytest.approx(-0.5 * (1 + 1))


def test_proximal_term_of_the_feddyn_program_by_hand() -> None:
    """mu = 1, gradient 4, limit 1, from x = 2: there mu * y is decay, outside of the clip, and -mu * x inside.

    Step 1: clip(4 - 2) + 2 = 3, y = 0.5.  Step 2: clip(4 - 2) + 0.5 = 1.5, y = -0.25.  `unused`: clip leaves no more
    than rounding of -2 + 2.
    """
    model = Line(2.0, unused=0.0)
    delta = train(model, [4.0, 4.0], fl.LocalRule(mu=1.0, gradient=DYN), max_gradient_norm=1.0).delta
    assert delta["y"].item() == pytest.approx(-2.25)


def test_orders_agree_without_clip_and_decay() -> None:
    """Then both are d = a * g + u + mu * (y - x)."""
    paper, program = (
        train(Line(2.0), [4.0, 3.0, 1.0], fl.LocalRule(0.5, u(2.0, 1.0), 0.3, gradient=rule)).delta
        for rule in (fl.GradientRule(), DYN)
    )
    torch.testing.assert_close(paper, program)


def test_local_heavy_ball_by_hand() -> None:
    """gamma = 0.5, v from 2, gradients 4 and 1, rate 0.5: v = 5, y = -2.5; v = 3.5, y = -4.25."""
    result = train(Line(0.0), [4.0, 1.0], fl.LocalRule(v=u(2.0), gamma=0.5))
    assert result.v is not None
    assert (result.delta["y"].item(), result.v["y"].item()) == (-4.25, 3.5)


def test_anchored_gradient_is_a_difference_by_hand() -> None:
    """The gradient of this loss is the same everywhere, so g(y) - g(x) = 0 and u = 3 alone moves y."""
    assert train(Line(1.0), [4.0, 7.0], fl.LocalRule(u=u(3.0), anchored=True)).delta["y"].item() == -3.0


def test_anchor_sees_the_batch_and_the_mask_of_the_step() -> None:
    """At y = x the difference is zero for every dropout mask: the first step changes nothing, bit for bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    batch = (torch.randn(6, 4), torch.randn(6, 2))
    rule = fl.LocalRule(anchored=True)
    result = fl.train_locally(model, [batch], nn.functional.mse_loss, rule, fl.LocalSettings(0.5))
    assert all(not tensor.any() for tensor in result.delta.values())
    assert result.buffers["2.num_batches_tracked"].item() == 1


def test_loss_is_the_mean_over_steps() -> None:
    """Loss y * g at y = 2 and then y = 1: (2 * 2 + 1 * 4) / 2 = 4."""
    assert train(Line(2.0), [2.0, 4.0]).loss == 4.0


def test_model_is_trained_in_training_mode_and_left_without_gradients() -> None:
    """Dropout and batch norm must see training mode; gradients would only take memory afterwards."""
    model = Line(1.0).eval()
    train(model, [1.0])
    assert model.training
    assert model.y.grad is None


def test_buffers_of_the_trained_model_are_reported() -> None:
    """Two batches through batch norm: its counter is 2 and its mean has moved."""
    result = fl.train_locally(
        nn.BatchNorm1d(1),
        [(torch.ones(4, 1) + torch.arange(4.0)[:, None], torch.zeros(4, 1))] * 2,
        nn.functional.mse_loss,
        fl.LocalRule(),
        fl.LocalSettings(0.1),
    )
    assert result.buffers["num_batches_tracked"].item() == 2
    assert result.buffers["running_mean"].item() == pytest.approx(2.5 * (1 - 0.9**2))


def test_same_start_gives_the_same_bits() -> None:
    """Training twice from one state and one seed gives equal deltas."""
    deltas = []
    for _ in range(2):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(3)]
        deltas.append(
            fl.train_locally(
                model, batches, nn.functional.cross_entropy, fl.LocalRule(mu=0.1), fl.LocalSettings(0.1, 0.01, 1.0)
            ).delta
        )
    torch.testing.assert_close(*deltas, rtol=0, atol=0)


def test_training_can_be_cancelled_after_any_step() -> None:
    """`on_step` is called with 0, 1, ...; its exceptions are raised."""
    seen = []

    def cancel(step: int) -> None:
        seen.append(step)
        if step == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fl.train_locally(
            Line(1.0),
            [slope(1.0)] * 5,
            mean_product,
            fl.LocalRule(),
            fl.LocalSettings(0.5),
            fl.LocalOptions(on_step=cancel),
        )
    assert seen == [0, 1]


def test_no_batches_is_an_error() -> None:
    """Without a step there is no K_i to divide by."""
    with pytest.raises(ValueError, match="expected at least one batch to train on, got none"):
        train(Line(1.0), [])


@pytest.mark.parametrize(
    ("direction", "message"),
    [
        ({"y": torch.zeros(1)}, r"\['unused'\] missing"),
        ({**u(0.0), "z": torch.zeros(1)}, r"\['z'\] unknown"),
        ({**u(0.0), "y": torch.zeros(())}, r"'y': expected float32\[1\], got float32\[\]"),
        ({**u(0.0), "y": torch.zeros(1, dtype=torch.float64)}, r"'y': expected float32\[1\], got float64\[1\]"),
    ],
    ids=["missing", "unknown", "broadcastable", "dtype"],
)
def test_direction_must_be_laid_out_as_the_model(direction: fl.Tensors, message: str) -> None:
    """A direction of another model is refused, also where torch would broadcast it, and the model stays."""
    model = Line(1.0)
    with pytest.raises(ValueError, match=message):
        train(model, [1.0], fl.LocalRule(u=direction))
    assert model.y.item() == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"learning_rate": 0.1, "weight_decay": -1.0},
        {"learning_rate": 0.1, "max_gradient_norm": float("inf")},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    """Rates and limits that would train nothing or ruin the model are refused by name."""
    with pytest.raises(ValueError, match=r"expected a (learning rate|weight decay|gradient norm)"):
        fl.LocalSettings(**settings)


@pytest.mark.parametrize(
    "rule",
    [
        fl.LocalRule(),
        fl.LocalRule(0.3, u(0.7)),
        fl.LocalRule(1.0, u(0.7), 0.3),
        fl.LocalRule(0.3, u(0.7), 0.3, v=u(0.9), gamma=0.5),
        fl.LocalRule(0.3, u(0.7), 0.3, gradient=fl.GradientRule(order="feddyn_code")),
        fl.LocalRule(0.3, u(0.7), gradient=fl.GradientRule(rho=0.1), anchored=True),
        fl.LocalRule(gradient=fl.GradientRule(rho=0.1, scope="tensor")),
    ],
    ids=["plain", "direction", "proximal", "heavy ball", "feddyn_code", "anchored sam", "sam by tensor"],
)
def test_a_gpu_and_a_cpu_differ_only_in_memory(monkeypatch: pytest.MonkeyPatch, rule: fl.LocalRule) -> None:
    """Without memory kept for results, as on a GPU, every bit is the same; the model keeps its own memory."""

    def made() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
        memory = [p.data_ptr() for p in model.parameters()]
        data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
        here = fl.read_state(model).trainable
        own = replace(rule, u=like(here, rule.u), v=like(here, rule.v))
        result = fl.train_locally(model, data, nn.functional.mse_loss, own, fl.LocalSettings(0.1, 0.01, 0.5))
        assert [p.data_ptr() for p in model.parameters()] == memory
        return [*result.delta.values(), *(result.v or {}).values(), *model.parameters(), torch.tensor(result.loss)]

    def like(tensors: fl.Tensors, given: fl.Tensors | None) -> fl.Tensors | None:
        return (
            None if given is None else {name: given["y"] * torch.ones_like(tensor) for name, tensor in tensors.items()}
        )

    cpu = made()
    monkeypatch.setattr(fl.tree, "scratch", lambda tensors: None)
    assert all(torch.equal(a, b) for a, b in zip(cpu, made(), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_steps_never_wait_for_the_gpu() -> None:
    """On CUDA no step reads a value back, with all options on; batches and u may start on the CPU."""

    def watched(step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")

    model, settings = Line(1.0).cuda(), fl.LocalSettings(0.1, 0.01, 1.0)
    inputs, targets = slope(1.0)
    batches = [(inputs.cuda(), targets.cuda())] * 3
    try:
        rule = fl.LocalRule(0.5, u(1.0), 0.1)
        with pytest.raises(RuntimeError, match="synchronizing"):  # the first wait is for the loss, after the last step
            fl.train_locally(model, batches, mean_product, rule, settings, fl.LocalOptions(on_step=watched))
        assert model.y.grad is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
