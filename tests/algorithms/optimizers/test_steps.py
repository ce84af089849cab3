"""Local steps by torch's optimizers, and their state: kept by a device, averaged by the server, or fresh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import algorithms as fl
from algorithms.optimizers.classes import BUILT_IN, averaged_symbols, check_optimizer, make_optimizers
from algorithms.optimizers.federated import check_combination, with_optimizer
from algorithms.optimizers.lion import Lion
from algorithms.optimizers.spec import OptimizerSpec, RateSchedule
from algorithms.optimizers.steps import LocalOptimizer
from algorithms.parameters import AlgorithmError

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :3].argmax(1)
RATE, K = 0.01, 3
SPECS = {
    "sgd": OptimizerSpec("sgd", {"momentum": 0.9, "nesterov": True}),
    "adam": OptimizerSpec("adam", {"betas": (0.8, 0.9)}),
    "adamw": OptimizerSpec("adamw", {"weight_decay": 0.1}),
    "rmsprop": OptimizerSpec("rmsprop", {"momentum": 0.5, "centered": True}),
    "lion": OptimizerSpec("lion", {"weight_decay": 0.1}),
    "muon": OptimizerSpec(
        "muon",
        {"momentum": 0.9, "ns_steps": 4.0, "adamw_weight_decay": 0.1, "adamw_names": "", "adamw_rate_ratio": 0.5},
    ),
    "torch.optim:NAdam": OptimizerSpec("torch.optim:NAdam", {"momentum_decay": 0.01}),
}


def model() -> nn.Module:
    """A small network, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(round_: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of a round."""
    parts = torch.arange(24).roll(5 * round_).split(24 // K)
    return [(INPUTS[part], TARGETS[part]) for part in parts]


def in_state(spec: OptimizerSpec, state: Any) -> OptimizerSpec:
    """The same optimizer with another home of its state."""
    return OptimizerSpec(spec.name, spec.parameters, state)


def one_client(spec: OptimizerSpec, rounds: int, method: str = "fedavg") -> tuple[fl.Tensors, fl.RunState]:
    """The model after rounds with a single client, and the state of the run."""
    algorithm, net = with_optimizer(fl.build(method), spec), model()
    state = fl.start_run(algorithm, net)
    for round_ in range(rounds):
        data = fl.LocalData(batches(round_), [], functional.cross_entropy, steps=K)
        client = fl.Participant("a", 24, lambda _, data=data: data)  # type: ignore[misc] # no type for a default
        settings, info = fl.LocalSettings(RATE), fl.RoundInfo(round_, RATE)
        state = fl.run_round(algorithm, state, net, [client], settings, info).state
    return state.server.x, state


def by_torch(make: Any, rounds: int) -> fl.Tensors:
    """The model after the same steps of torch alone, which are not interrupted."""
    net = model()
    optimizer = make(list(net.parameters()))
    for round_ in range(rounds):
        for inputs, targets in batches(round_):
            optimizer.zero_grad()
            functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def close(a: fl.Tensors, b: fl.Tensors, tolerance: float = 1e-6) -> bool:
    """Whether all entries agree."""
    return all(torch.allclose(a[name], b[name], rtol=0, atol=tolerance) for name in b)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda params: torch.optim.SGD(params, RATE, momentum=0.9, nesterov=True)),
        ("adam", lambda params: torch.optim.Adam(params, RATE, betas=(0.8, 0.9))),
        ("adamw", lambda params: torch.optim.AdamW(params, RATE, weight_decay=0.1)),
        ("rmsprop", lambda params: torch.optim.RMSprop(params, RATE, momentum=0.5, centered=True)),
        ("lion", lambda params: Lion(params, RATE, weight_decay=0.1)),
        ("torch.optim:NAdam", lambda params: torch.optim.NAdam(params, RATE, momentum_decay=0.01)),
    ],
)
def test_a_kept_state_goes_on_as_if_uninterrupted(name: str, make: Any) -> None:
    """With one client and eta_g = 1, three rounds are the steps of torch alone; with a fresh state they are not."""
    kept, _ = one_client(in_state(SPECS[name], "device"), 3)
    assert close(kept, by_torch(make, 3))
    assert close(one_client(SPECS[name], 1)[0], by_torch(make, 1))
    assert not close(one_client(SPECS[name], 3)[0], kept, 1e-5)


def test_muon_makes_the_steps_of_matrices_and_adamw_those_of_vectors() -> None:
    """Each with its own arguments."""

    class Both:
        def __init__(self, params: list[nn.Parameter]) -> None:
            matrices, others = (
                [parameter for parameter in params if (parameter.dim() == 2) is wanted] for wanted in (True, False)
            )
            self.all = (
                torch.optim.Muon(matrices, RATE, momentum=0.9, ns_steps=4, weight_decay=0.0),
                torch.optim.AdamW(others, RATE / 2, betas=(0.9, 0.95), weight_decay=0.1),
            )

        def zero_grad(self) -> None:
            for optimizer in self.all:
                optimizer.zero_grad()

        def step(self) -> None:
            for optimizer in self.all:
                optimizer.step()  # type: ignore[no-untyped-call] # of Muon

    assert close(one_client(in_state(SPECS["muon"], "device"), 3)[0], by_torch(Both, 3))


@pytest.mark.parametrize(
    ("parameters", "hidden", "ratio"),
    [
        pytest.param({}, {"1.weight", "2.weight"}, 0.015, id="as its author advises"),
        pytest.param({"adamw_names": "1.*, 0.*"}, {"2.weight", "3.weight"}, 0.015, id="patterns"),
        pytest.param({"adamw_names": ""}, {"0.weight", "1.weight", "2.weight", "3.weight"}, 0.015, id="no pattern"),
        pytest.param({"adjust_lr_fn": "match_rms_adamw"}, {"1.weight", "2.weight"}, 1.0, id="one rate"),
    ],
)
def test_muon_leaves_embeddings_and_the_head_to_adamw(
    parameters: dict[str, str], hidden: set[str], ratio: float
) -> None:
    """AdamW has its own share of the rate, and neither has a decay that nobody asked for."""
    net = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    y = {name: parameter.detach() for name, parameter in net.named_parameters()}
    muon, adamw = make_optimizers(OptimizerSpec("muon", parameters), y, {}, net)
    assert muon.tensors.keys() == hidden
    assert adamw.tensors.keys() == y.keys() - hidden
    assert (muon.rate_ratio, adamw.rate_ratio) == pytest.approx((1.0, ratio))
    assert {part.optimizer.param_groups[0]["weight_decay"] for part in (muon, adamw)} == {0.0}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_server_averages_what_the_next_round_starts_from(name: str) -> None:
    """The memory has the averaged tensors, and they change the second round but not the first."""
    spec = in_state(SPECS[name], "server")
    check_optimizer(spec)
    x, state = one_client(spec, 2)
    assert set(state.server.memory) == {f"optimizer.{symbol}" for symbol in averaged_symbols(spec)}
    assert close(one_client(spec, 1)[0], one_client(SPECS[name], 1)[0], 0.0)
    assert not close(x, one_client(SPECS[name], 2)[0], 1e-6)


def test_averaged_moments_are_bias_corrected() -> None:
    """After one step with gradient g, Adam's are g and g^2: m = (1 - b1) g and 1 - b1^1 = 1 - b1."""
    g = {"w": torch.tensor([0.5, -2.0])}
    steps = LocalOptimizer(in_state(SPECS["adam"], "server")).begin({"w": torch.zeros(2)})
    steps.step(g, RATE)
    found = steps.memory()
    assert close(found["optimizer.exp_avg"], g)
    assert close(found["optimizer.exp_avg_sq"], {"w": g["w"] ** 2})


def test_a_start_from_averaged_moments_needs_no_step_count() -> None:
    """From m = g and v = g^2 a step with g again has length eta in every entry: no correction is applied twice."""
    g = {"w": torch.tensor([0.5, -2.0])}
    start = {"optimizer.exp_avg": g, "optimizer.exp_avg_sq": {"w": g["w"] ** 2}}
    y = {"w": torch.zeros(2)}
    LocalOptimizer(in_state(SPECS["adam"], "server"), start=start).begin(y).step(g, RATE)
    assert close(y, {"w": torch.tensor([-RATE, RATE])})


def test_a_mean_of_squares_is_never_negative() -> None:
    """A client may send anything; the root of the mean is taken in the next round."""
    algorithm = with_optimizer(fl.build("fedavg"), in_state(SPECS["adamw"], "server"))
    state = algorithm.init({"w": torch.zeros(2)})
    sums = {name: {"w": torch.tensor([-1.0, 1.0])} for name in ("Dbar", "optimizer.exp_avg", "optimizer.exp_avg_sq")}
    memory = algorithm.server_step(state, sums, fl.RoundInfo(0, RATE)).memory
    assert memory["optimizer.exp_avg_sq"]["w"].tolist() == [0.0, 1.0]
    assert memory["optimizer.exp_avg"]["w"].tolist() == [-1.0, 1.0]


def test_the_optimizer_gets_the_corrected_gradient() -> None:
    """With SGD of momentum 0 and a decay of its own, FedProx's d is applied: the steps are those of plain FedProx."""
    algorithm, net = fl.build("fedprox", mu=0.5), model()
    x = fl.read_state(net).trainable
    rule = algorithm.local_rule(None)
    plain = fl.train_locally(
        model(), batches(0), functional.cross_entropy, rule, fl.LocalSettings(RATE, weight_decay=0.1)
    )
    spec = OptimizerSpec("sgd", {"momentum": 1e-9})
    with_sgd = with_optimizer(algorithm, spec).local_rule(None)
    made = fl.train_locally(
        net,
        batches(0),
        functional.cross_entropy,
        with_sgd,
        fl.LocalSettings(RATE, weight_decay=0.1),
        fl.LocalOptions(x),
    )
    assert close(made.delta, plain.delta)


def test_plain_sgd_is_no_optimizer() -> None:
    """The method stays the same object, and so its code and its bits."""
    algorithm = fl.build("fedcm")
    for spec in (OptimizerSpec(), OptimizerSpec("sgd"), OptimizerSpec("sgd", {"momentum": 0.0, "nesterov": False})):
        assert with_optimizer(algorithm, spec) is algorithm


@pytest.mark.parametrize("method", fl.names())
def test_a_method_names_the_reason_why_it_needs_plain_sgd(method: str) -> None:
    """It is refused with the reason; `inexact` allows all methods but MFL, whose steps have a momentum of their own."""
    algorithm, adamw = fl.build(method), SPECS["adamw"]
    exact = not (algorithm.needs_sgd or algorithm.own_steps)
    assert exact == (method not in {"fedcm", "mofedsam", "qg", "scaffold", "feddyn", "fednova", "mfl", "proxskip"})
    if exact:
        check_combination(algorithm, adamw, RateSchedule("cosine"))
        return
    with pytest.raises(AlgorithmError, match=method) as refused:
        check_combination(algorithm, adamw, RateSchedule())
    assert (algorithm.needs_sgd or algorithm.own_steps) in str(refused.value)
    if method != "mfl":
        check_combination(algorithm, adamw, RateSchedule("cosine"), inexact=True)


@pytest.mark.parametrize("method", [name for name in fl.names() if fl.build(name).needs_sgd])
def test_a_method_that_divides_by_the_sum_of_rates_allows_a_schedule(method: str) -> None:
    """The others that need plain SGD refuse it, and so does every method with FedNova's normaliser."""
    plain, cosine = OptimizerSpec(), RateSchedule("cosine")
    algorithm = fl.build(method)
    if method in {"fedcm", "mofedsam", "qg"}:
        check_combination(algorithm, plain, cosine)
        algorithm = fl.build(method, normaliser="fednova")
    with pytest.raises(AlgorithmError, match=r"Leave out local\.schedule"):
        check_combination(algorithm, plain, cosine)


def test_scaffold_with_full_gradients_needs_no_plain_sgd() -> None:
    """Its variates are gradients, whichever steps follow, so it has no reason against them; option II has one."""
    scaffold = fl.build("scaffold", option="I")
    check_combination(scaffold, SPECS["adamw"], RateSchedule("linear"))
    assert (scaffold.needs_sgd, bool(fl.build("scaffold", option="II").needs_sgd)) == ("", True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (OptimizerSpec("adam", {"beta": 0.9}), "unknown parameter of adam: 'beta'. Did you mean 'betas'"),
        (OptimizerSpec("adam", {"fused": True}), "fused: .* the device chooses how to compute"),
        (OptimizerSpec("muon", {"adamw_names": 3}), "adamw_names: expected patterns of names"),
        (OptimizerSpec("muon", {"adamw_rate_ratio": 0}), "adamw_rate_ratio: expected a number over 0, got 0"),
        (OptimizerSpec("lion", {"betas": (1.5, 0.9)}), "expected two betas, at least 0 and below 1"),
        (OptimizerSpec("adam", {"amsgrad": True}, "server"), "a maximum has no average"),
        (OptimizerSpec("torch.optim:Adadelta", {}, "server"), "the server averages the states of adam, adamw"),
        (OptimizerSpec("torch.optim:Nothing"), "expected a class of torch.optim.Optimizer"),
        (OptimizerSpec("torch.optim:Optimizer"), "it is the base of all classes"),
        (OptimizerSpec("other:Sgd", {"lr": 0.1}), "local.learning_rate is the learning rate"),
    ],
)
def test_a_wrong_optimizer_is_refused(spec: OptimizerSpec, message: str) -> None:
    """With what was expected."""
    with pytest.raises(AlgorithmError, match=message):
        check_optimizer(spec)


def test_an_optimizer_of_another_package_is_used_only_if_it_is_given() -> None:
    """Nothing is imported by its name."""
    check_optimizer(OptimizerSpec("other:Mine"))
    with pytest.raises(AlgorithmError, match="one that this device's settings list"):
        LocalOptimizer(OptimizerSpec("other:Mine")).begin({"w": torch.zeros(1)})
    y = {"w": torch.zeros(1)}
    LocalOptimizer(OptimizerSpec("other:Mine"), {"other:Mine": Lion}).begin(y).step({"w": torch.ones(1)}, 0.5)
    assert y["w"].item() == -0.5


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (RateSchedule(), [1, 1, 1, 1]),
        (RateSchedule("linear"), [1, 0.75, 0.5, 0.25]),
        (RateSchedule("linear", end=0.2), [1, 0.8, 0.6, 0.4]),
        (RateSchedule("cosine"), [1, 0.853553, 0.5, 0.146447]),
        (RateSchedule("constant", warmup=0.5), [1 / 3, 2 / 3, 1, 1]),
        (RateSchedule("linear", warmup=0.5), [1 / 3, 2 / 3, 1, 0.5]),
    ],
)
def test_a_schedule_over_four_steps(schedule: RateSchedule, factors: list[float]) -> None:
    """By the formulas of its docstring; later steps have the last value, which is over 0."""
    assert [schedule.factor(step, 4) for step in range(4)] == pytest.approx(factors, abs=1e-6)
    assert schedule.factor(9, 4) == pytest.approx(factors[-1], abs=1e-6)
    assert schedule.factor(3, 4) > 0


def test_the_rate_follows_the_schedule() -> None:
    """With a gradient of 1, y moves by eta times the sum of the factors: 0.1 (1 + 2/3 + 1/3)."""
    net = nn.Linear(1, 1, bias=False)
    data = [(torch.ones(1, 1), torch.ones(1))] * 3
    settings = fl.LocalSettings(0.1, schedule=RateSchedule("linear"))
    rule = fl.build("fedavg").local_rule(None)
    result = fl.train_locally(
        net, data, lambda output, target: (output[:, 0] * target).mean(), rule, settings, fl.LocalOptions(steps=3)
    )
    assert result.delta["weight"].item() == pytest.approx(-0.1 * (1 + 2 / 3 + 1 / 3))
    with pytest.raises(ValueError, match="expected the number of steps with a schedule"):
        fl.train_locally(net, data, functional.cross_entropy, rule, settings)


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedrobust", "mimelite"])
def test_micro_batches_give_the_gradient_of_the_batch(method: str) -> None:
    """Parts of 3, 3 and 2 of a batch of 8 give the same steps, also at SAM's point and with an ascent of the inputs."""
    found = []
    for size in (0, 3):
        algorithm = fl.build(method)
        data = fl.LocalData(batches(0), batches(0), functional.cross_entropy)
        context = fl.ClientContext({} if method != "mimelite" else fl.read_state(model()).trainable)
        work = fl.Work(algorithm, context, fl.LocalSettings(RATE, max_gradient_norm=1.0, micro_batch_size=size))
        found.append(fl.answer(model(), data, work))
    assert close(found[0].payloads["delta"], found[1].payloads["delta"])
    assert found[0].loss == pytest.approx(found[1].loss)


def test_a_scaled_loss_gives_the_same_steps() -> None:
    """In float32 the scale, a power of two, changes nothing but the last bits."""
    rule, plain = fl.build("fedsam").local_rule(None), fl.LocalSettings(RATE, max_gradient_norm=1.0)
    expected = fl.train_locally(model(), batches(0), functional.cross_entropy, rule, plain)
    settings = fl.LocalSettings(RATE, max_gradient_norm=1.0, scaled_loss=True, micro_batch_size=5)
    assert close(fl.train_locally(model(), batches(0), functional.cross_entropy, rule, settings).delta, expected.delta)


def test_a_batch_whose_scaled_gradient_overflows_is_repeated() -> None:
    """Every step is made: the scale is halved until the gradients are finite."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    passes: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        passes.append(1)
        return (output * target).mean() * 1e35  # times 2^16 this is more than float32 holds

    rule, data = fl.build("fedavg").local_rule(None), [(torch.ones(1, 1), torch.ones(1, 1))] * 2
    result = fl.train_locally(net, data, loss, rule, fl.LocalSettings(1e-35, scaled_loss=True))
    assert result.steps == 2
    assert result.delta["weight"].item() == pytest.approx(-2.0)
    assert len(passes) > 3
