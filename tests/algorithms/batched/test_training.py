"""Recorded steps: the same as the called steps of a group, for every term of a rule."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from time import thread_time

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl
from algorithms.batched import training as training_module
from algorithms.batched.batches import Finish, Plan, Planned, StepBatches, drawn_ahead
from algorithms.batched.choice import Facts, choose
from algorithms.batched.client import answer_together
from algorithms.batched.contexts import Contexts, rules_of
from algorithms.batched.members import Members
from algorithms.batched.modules import CountedNumbers, OwnNumbers, RandomStream
from algorithms.batched.recording import NotRecorded, Recorder
from algorithms.batched.strategies import Name, Strategy
from algorithms.batched.training import SEEN as SEEN_BY_DEVICE
from algorithms.batched.training import Training
from algorithms.model_state import trainable_views
from tests.algorithms.batched.clients import CPU, make, small_cnn
from tests.algorithms.batched.test_batches import batch_norms, dropouts
from tests.algorithms.batched.test_methods import FULL, strategy_of
from tests.algorithms.test_conformance import ROWS
from tests.marks import slow_except

SIZES, BATCH, EPOCHS = (14, 9, 6, 4), 4, 2
SEEN = SEEN_BY_DEVICE["cpu"]
LABELS = (
    "fedavg",
    "fedcm-0.1",
    "scaffold-I",
    "feddyn-examples",
    "mime",
    "fedsam-tensor",
    "fedsam-p",
    "mofedsam",
    "mfl",
)


def plan(sizes: Sequence[int], epochs: int) -> Plan:
    """Batches in order, the last one of an epoch smaller."""
    counts = [-(-size // BATCH) * epochs for size in sizes]
    rows = torch.zeros(counts[0], len(sizes), BATCH, dtype=torch.int64)
    found = [[0] * len(sizes) for _ in range(counts[0])]
    for client, (size, first) in enumerate(zip(sizes, (0, *torch.tensor(sizes).cumsum(0).tolist()), strict=False)):
        for step in range(counts[client]):
            own = torch.arange(size).split(BATCH)[step % -(-size // BATCH)] + first
            rows[step, client], found[step][client] = own[0], len(own)
            rows[step, client, : len(own)] = own
    return Plan(rows, found)


@cache
def pictures(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The images and labels of all clients, in the same memory in each round."""
    numbers = torch.Generator().manual_seed(5)
    images = torch.randn(sum(SIZES), 1, 6, 6, generator=numbers, dtype=torch.float64)
    return images.to(device, dtype), torch.randint(3, (sum(SIZES),), generator=numbers).to(device)


def group(
    label: str, model: nn.Module, seed: int, sizes: Sequence[int] = SIZES, finish: Finish | None = None
) -> Members:
    """Clients with states and directions of a seed, whose batches are planned."""
    name, parameters = ROWS[label]
    algorithm, device = fl.build(name, **parameters), next(model.parameters()).device
    numbers, dtype = torch.Generator().manual_seed(seed), next(model.parameters()).dtype
    images, targets = pictures(device, dtype)
    x = {each: tensor.detach() for each, tensor in model.named_parameters()}

    def values() -> fl.Tensors:
        return {each: torch.randn(it.shape, generator=numbers, dtype=torch.float64).to(it) for each, it in x.items()}

    contexts = [
        fl.ClientContext(values(), {symbol: values() for symbol in algorithm.client_init(x)}, 0.5 + size / 10)
        for size in sizes
    ]
    if algorithm.objective == "uniform":
        contexts = [replace(context, omega=1.0) for context in contexts]
    contexts = [replace(context, direction=contexts[0].direction) for context in contexts]
    exchange = len(algorithm.exchanges) - 1
    steps, once = (Plan(each.rows.to(device), each.sizes) for each in (plan(sizes, EPOCHS), plan(sizes, 1)))
    streams = [RandomStream(device, seed + client) for client in range(len(sizes))]
    epoch_steps = [-(-size // BATCH) for size in sizes]
    return Members(
        fl.Work(algorithm, contexts[0], replace(FULL, learning_rate=0.1 / (1 + seed)), exchange),
        Contexts.of_clients(contexts),
        Planned(images, targets, steps, once, finish, streams=streams),
        [EPOCHS * count for count in epoch_steps],
        epoch_steps,
        CountedNumbers.of_seeds([seed + client for client in range(len(sizes))], device),
    )


def answers(model: nn.Module, members: Members, training: Training) -> dict[str, Tensor]:
    """All numbers of the updates."""
    found = answer_together(model, members, training)
    named = {f"{payload} {name}": it for payload, values in found.payloads.items() for name, it in values.items()}
    losses = torch.tensor([[loss or 0.0] for loss in found.losses], dtype=torch.float64)
    epochs = torch.tensor([each["loss"] for epochs in found.epochs for each in epochs], dtype=torch.float64)
    return {**named, **found.buffers, "losses": losses, "epochs": epochs}


def training_of(strategy: Strategy, *, masks: bool = False, means: bool = True) -> Training:
    """For a model whose examples are independent, or are not."""
    return Training(strategy, Facts(False, means, means), thread_time, masks=masks)


@pytest.fixture(autouse=True)
def _long_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "SHORT_S", math.inf)


@pytest.mark.parametrize("label", slow_except(LABELS, "mime"))
def test_recorded_steps_are_those_of_the_group(label: str) -> None:
    """Groups of other values, rates and states use the memory of the first one: short batches, 8, 6, 4 and 2 steps."""
    model = make(0, small_cnn, torch.float64)
    strategy = strategy_of("grouped", model)
    recorded, called = training_of(strategy, masks=True), training_of(strategy)
    for seed in range(SEEN + 2):
        expected, found = (answers(model, group(label, model, seed), each) for each in (called, recorded))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert str(recorded) == "steps of 1 shapes are recorded"


@pytest.mark.parametrize(("model", "sizes"), [(batch_norms, (8, 8, 4)), (dropouts, (8, 8, 4))])
def test_running_statistics_and_masks_of_clients_that_are_done(
    model: Callable[[], nn.Module], sizes: Sequence[int]
) -> None:
    """Buffers stay after a client's last step, and the masks are those of the same step and client."""
    module = make(0, model, torch.float64)
    strategy = strategy_of("grouped", module, fill=False)
    recorded, called = training_of(strategy, masks=True, means=False), training_of(strategy, means=False)
    for seed in range(SEEN + 2):
        expected, found = (answers(module, group("fedsam", module, seed, sizes), each) for each in (called, recorded))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert str(recorded) == "steps of 1 shapes are recorded"


@pytest.mark.parametrize("label", slow_except(LABELS, "fedsam-tensor"))
def test_a_recording_changes_no_bit(label: str) -> None:
    """Groups of as many steps have the bits of the groups before the recording: a process that starts later, too."""
    model = make(0, small_cnn, torch.float32)
    strategy = strategy_of("grouped", model)
    recorded = training_of(strategy)
    for seed in range(SEEN + 2):
        found = answers(model, group(label, model, seed, (8, 8, 8)), recorded)
        expected = answers(model, group(label, model, seed, (8, 8, 8)), training_of(strategy))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert str(recorded) == "steps of 1 shapes are recorded"


def test_a_group_that_cannot_be_recorded_leaves_the_others() -> None:
    """Clients with other numbers of steps are between groups of equal ones, whose third is recorded."""
    model = make(0, small_cnn, torch.float64)
    training = training_of(strategy_of("grouped", model))
    for seed, sizes in enumerate([(8, 8), (8, 4), (8, 8), (8, 8)]):
        answers(model, group("fedavg", model, seed, sizes), training)
    assert str(training) == "steps of 1 shapes are recorded (some clients have fewer steps or examples than others)"


def test_what_is_not_recorded_says_why() -> None:
    """Other steps on a CPU, a loss that is no mean, random numbers of clients, and long steps."""
    model = make(0, small_cnn, torch.float64)
    strategy, members = strategy_of("grouped", model), group("fedavg", model, 0)
    own = replace(members, numbers=OwnNumbers([RandomStream(CPU, 0)] * 4))
    for training, some, why in (
        (training_of(strategy), members, "some clients have fewer steps"),
        (training_of(strategy, masks=True, means=False), members, "batches have several sizes"),
        (Training(strategy, Facts(True, True, True), thread_time, masks=True), own, "the clients draw random numbers"),
    ):
        answers(model, some, training)
        assert str(training).startswith(f"no step is recorded ({why}")


def test_steps_that_take_long_are_not_recorded_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to nothing of their time is Python, and a recording takes time."""
    monkeypatch.setattr(training_module, "SHORT_S", 0.0)
    model = make(0, small_cnn, torch.float64)
    training = training_of(strategy_of("grouped", model))
    for seed in range(SEEN + 1):
        answers(model, group("fedavg", model, seed, (8, 8)), training)
    assert str(training).startswith("no step is recorded (one takes ")


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda tensor: tensor.add_(1.0 if tensor.sum().item() > 0 else 2.0), "data-dependent"),
        (lambda tensor: tensor.add_(torch.rand(3)), "random numbers"),
    ],
)
def test_code_that_cannot_be_recorded_is_refused(step: Callable[[Tensor], object], why: str) -> None:
    """A number of a tensor that decides, and a random number, would be those of the recording in every step."""
    memory = torch.ones(3)
    with pytest.raises(NotRecorded, match=why):
        Recorder(CPU).record(lambda: step(memory), [memory])


def test_masks_by_counter_depend_on_seed_step_and_place_alone() -> None:
    """The same for a client in any group, and in a second pass of a step; others in the next step and module."""
    inputs, seeds = torch.ones(3, 4, 5000, dtype=torch.float64), [5, 1 << 63, 7]
    numbers = CountedNumbers.of_seeds(seeds, CPU)
    one_pass = numbers.of(range(3))
    first, second_module = one_pass.masks(inputs, 0.3), one_pass.masks(inputs, 0.3)
    assert torch.equal(numbers.of(range(3)).masks(inputs, 0.3), first)
    assert torch.equal(CountedNumbers.of_seeds(seeds[1:], CPU).of(range(2)).masks(inputs[1:], 0.3), first[1:])
    numbers.next_step()
    for other in (second_module, numbers.of(range(3)).masks(inputs, 0.3), first.roll(1, 0)):
        assert float((other == first).double().mean()) == pytest.approx(0.7**2 + 0.3**2, abs=0.02)
    assert set(first.unique().tolist()) == {0.0, 1 / 0.7}
    torch.testing.assert_close(
        (first == 0).double().mean(dim=(1, 2)), torch.full((3,), 0.3).double(), rtol=0, atol=0.02
    )


def test_numbers_of_all_steps_are_drawn_at_once() -> None:
    """They have a place for each example of the plan, and depend on the seeds alone."""
    rows = torch.zeros(5, 3, 4, dtype=torch.int64)

    def draw(inputs: Tensor) -> tuple[Tensor, ...]:
        return torch.rand(len(inputs)), torch.randint(3, (len(inputs), 2))

    first, again, other = (drawn_ahead(draw, torch.ones(2, 7), rows, seeds) for seeds in ((1, 2), (1, 2), (2, 1)))
    assert [each.shape for each in first] == [(5, 3, 4), (5, 3, 4, 2)]
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def called(model: nn.Module, members: Members, strategy: Strategy, *, means: bool = True) -> dict[str, Tensor]:
    """The numbers of a group whose steps are called in fixed memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(training_module.MOST_RECORDED, "cuda", 0)
        training = training_of(strategy, masks=True, means=means)
        found = answers(model, members, training)
    assert str(training) == "no step is recorded"
    return found


@pytest.mark.parametrize(
    ("label", "model", "means"),
    slow_except(
        [(label, *one) for label in LABELS for one in ((small_cnn, True), (dropouts, False), (batch_norms, False))],
        ("mofedsam", dropouts, False),
    ),
)
def test_recorded_steps_on_cuda_have_the_bits_of_called_ones(
    gpu: torch.device, label: str, model: Callable[[], nn.Module], means: bool
) -> None:
    """On a GPU a replay gives every bit of the same step in fixed memory, with other values, steps and masks."""
    sizes = SIZES if means else (8, 8, 4)
    module = make(0, model, torch.float32).to(gpu)
    strategy = strategy_of("grouped", module, fill=means)
    replayed = training_of(strategy, masks=True, means=means)
    for seed in range(3):
        found = answers(module, group(label, module, seed, sizes), replayed)
        expected = called(module, group(label, module, seed, sizes), strategy, means=means)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert str(replayed) == "steps of 1 shapes are recorded", str(replayed)
    assert replayed.client_bytes > 0


@pytest.mark.parametrize("name", slow_except(["one_by_one", "streams"], "streams"))
def test_every_strategy_is_recorded_on_cuda(gpu: torch.device, name: Name) -> None:
    """A pass for each client, which is one graph then."""
    module = make(0, small_cnn, torch.float32).to(gpu)
    strategy = strategy_of(name, module)
    recorded = training_of(strategy, masks=True)
    for seed in range(2):
        found = answers(module, group("fedcm-0.1", module, seed, (8, 4)), recorded)
        expected = called(module, group("fedcm-0.1", module, seed, (8, 4)), strategy)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert str(recorded) == "steps of 1 shapes are recorded", str(recorded)


@pytest.mark.parametrize(
    ("name", "label"), slow_except(product(["grouped", "streams"], ["scaffold-I", "mofedsam"]), ("grouped", "mofedsam"))
)
def test_recordings_of_several_shapes_share_memory_on_cuda(gpu: torch.device, name: Name, label: str) -> None:
    """Cohorts of other sizes in any order have the bits of steps that are called, also after a lack of memory."""
    module = make(0, small_cnn, torch.float32).to(gpu)
    strategy = strategy_of(name, module)
    recorded, seed = training_of(strategy, masks=True), 0
    for _ in range(2):
        for clients in (3, 1, 2):
            seed += 1
            found = answers(module, group(label, module, seed, (8,) * clients), recorded)
            expected = called(module, group(label, module, seed, (8,) * clients), strategy)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert str(recorded) == "steps of 3 shapes are recorded", str(recorded)
        recorded.forget()
        assert str(recorded) == "no step is recorded"


def test_a_recording_that_fails_on_cuda_leaves_the_stream_and_the_memory_of_the_others(gpu: torch.device) -> None:
    """The step waits for a value. Another recorder's step is recorded after it, and this one's, too."""
    recorder, number = Recorder(gpu), torch.zeros(1, device=gpu)
    before = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(NotRecorded, match="capture|capturing"):
            recorder.record(lambda: number.add_(number.item()), [number])
        assert torch.cuda.current_stream() == before
        play = recorder.record(lambda: number.add_(1), [number])
        number.zero_()
        play()
        play()
        assert number.tolist() == [2.0]


def test_passes_on_cuda_are_measured_on_memory_that_is_kept(gpu: torch.device) -> None:
    """All strategies are recorded and played in turn, with running statistics that each pass changes."""
    module = make(0, batch_norms, torch.float32).to(gpu)
    data = fl.LocalData([], [], nn.functional.cross_entropy)
    images, targets = torch.randn(2, 4, 1, 6, 6, device=gpu), torch.zeros(2, 4, dtype=torch.int64, device=gpu)
    chosen = choose(module, data, StepBatches((images, targets), [4, 4]), thread_time)
    assert ([*chosen.seconds], chosen.impossible) == (["grouped", "one_by_one", "streams"], {})


def test_the_memory_of_steps_that_are_not_recorded_goes_with_their_group() -> None:
    """Without a search for cycles, which may come after many groups."""
    model = make(0, small_cnn, torch.float64)
    training, members = training_of(strategy_of("grouped", model)), group("fedavg", model, 0, (8, 8))
    found = answer_together(model, members, training)
    gc.collect()
    gc.disable()
    try:
        steps, losses = training.train(
            model, members, rules_of(members.work.algorithm, members.contexts, trainable_views(model))
        )
        gone = weakref.ref(steps)
        del steps, losses
        assert gone() is None
    finally:
        gc.enable()
    assert len(found.losses) == 2
