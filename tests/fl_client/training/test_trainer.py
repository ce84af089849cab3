"""The trainer sends the payloads of the method's client half, for every method and every exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import algorithms as fl
from algorithms import tree
from algorithms.base import Memory
from fl_client.connection.bundles.expected import Bundle
from fl_client.errors import WorkFailed
from fl_client.training.own_loop import OnStep
from fl_client.training.results import Interrupted, TrainingResult
from fl_client.training.trainer import Trainer
from fl_tasks.batches import batches, ordered_batches, seed_everything
from fl_tasks.data.samples import Samples
from protos.codec import Layout, digest_message, digest_of, pack
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import payload_kind
from tests.fl_client.devices import METHODS, WEIGHTED, SmallTask, assignment, bundles, local_task, payloads, start

ALL = METHODS | WEIGHTED
EXCHANGES = [(name, j) for name, algorithm in METHODS.items() for j in range(len(algorithm.exchanges))]

Change = Callable[[training_pb2.Assignment], None]


def like(tensors: fl.Tensors, seed: int) -> dict[str, torch.Tensor]:
    """Random tensors with the layout of others."""
    draw = torch.Generator().manual_seed(seed)
    return tree.map(lambda tensor: 0.1 * torch.randn(tensor.shape, generator=draw), tensors)


def down(algorithm: fl.Algorithm, exchange: int, x: fl.Tensors) -> fl.Tensors | None:
    """The direction of a round with nonzero server state and sums."""
    state = algorithm.init(x)
    state = state.replace(memory={symbol: like(x, i) for i, symbol in enumerate(state.memory)})
    return algorithm.exchanges[exchange].direction(state, {"cbar": like(x, 9)})


def kept(algorithm: fl.Algorithm, x: fl.Tensors) -> Memory:
    """A client state after some rounds; None for methods without client states."""
    return {symbol: like(x, 20) for symbol in algorithm.client_init(x)}


def train(
    name: str,
    exchange: int = 0,
    state: Memory | None = None,
    change: Change | None = None,
    on_step: OnStep = lambda step, steps: None,
) -> TrainingResult:
    """The trainer's result for an assignment, changed by `change`."""
    algorithm, model, wanted = ALL[name], start(), assignment(ALL[name], exchange)
    if change is not None:
        change(wanted)
    given = bundles(model, down(algorithm, exchange, fl.read_state(model).trainable))
    return Trainer(local_task()).train(wanted, given, state, on_step)


def answered(name: str, exchange: int, state: Memory, omega: float = 1.0) -> tuple[fl.ClientContext, fl.ClientUpdate]:
    """The payloads of the method's client half, and its inputs."""
    algorithm, model, examples = ALL[name], start(), local_task().train
    direction = down(algorithm, exchange, fl.read_state(model).trainable)
    context = fl.ClientContext(direction, state, omega)
    seed_everything(11)
    data = fl.LocalData(batches(examples, 3, 11, epochs=2), ordered_batches(examples, 3), local_task().task.loss)
    work = fl.Work(algorithm, context, fl.LocalSettings(0.1), exchange)
    return context, fl.answer(model, data, work)


def equal(got: fl.Tensors, expected: fl.Tensors) -> bool:
    """Whether names, their order and all bits are equal."""
    return list(got) == list(expected) and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("name", "exchange"), EXCHANGES)
def test_an_update_holds_what_the_method_answers(name: str, exchange: int) -> None:
    """It has each payload bit for bit, deltas followed by buffers, and the digest and facts of the update."""
    state = kept(METHODS[name], fl.read_state(start()).trainable)
    _, expected = answered(name, exchange, state)
    update = train(name, exchange, state).update
    got = payloads(update)
    assert list(got) == [payload_kind(payload) for payload in expected.payloads]
    for payload, tensors in expected.payloads.items():
        laid_out = {**tensors, **expected.buffers} if payload == "delta" else tensors
        assert equal(got[payload_kind(payload)], laid_out), payload
    assert update.header.digest == digest_message(digest_of(*update.pieces))
    assert (update.header.num_examples, update.header.num_steps) == (8, expected.steps)
    assert update.header.HasField("training_loss") is (expected.loss is not None)


@pytest.mark.parametrize("name", METHODS)
def test_only_methods_with_client_states_give_a_next_one(name: str) -> None:
    """The next state of a full round is the method's result, and None for methods without client states."""
    algorithm = METHODS[name]
    state = kept(algorithm, fl.read_state(start()).trainable)
    last = len(algorithm.exchanges) - 1
    context, expected = answered(name, last, state)
    next_state = train(name, last, state).next_state
    assert (next_state is not None) is algorithm.keeps_client_state
    if next_state is not None:
        after = algorithm.next_client_state(context, expected)
        assert list(next_state.at(1.0)) == list(after)
        assert all(equal(next_state.at(1.0)[symbol], after[symbol]) for symbol in after)


@pytest.mark.parametrize("name", ["scaffold", "scaffold-I", "feddyn", "fedrobust"])
def test_a_clipped_round_leaves_the_state_of_the_clipped_delta(name: str) -> None:
    """If a quarter of the delta counts, the blend of two states is the method's state for that delta."""
    algorithm = METHODS[name]
    state = kept(algorithm, fl.read_state(start()).trainable)
    context, expected = answered(name, 0, state)
    after = algorithm.next_client_state(context, expected.admitted(0.25))
    next_state = train(name, 0, state).next_state
    assert next_state is not None
    torch.testing.assert_close(next_state.at(0.25), dict(after), rtol=1e-5, atol=1e-7)


def test_without_a_kept_state_the_method_s_first_one_is_used() -> None:
    """FedDyn from no state is FedDyn from h_i = 0."""
    zero = {"h_i": tree.full_like(fl.read_state(start()).trainable, 0.0)}
    assert train("feddyn").update.pieces == train("feddyn", state=zero).update.pieces


def with_population(wanted: training_pb2.Assignment) -> None:
    """N = 4 clients with 16 examples, 8 of them here."""
    wanted.training.population, wanted.training.population_examples = 4, 16


@pytest.mark.parametrize(
    ("name", "omega"),
    [("feddyn", 1.0), ("feddyn-examples", 2.0), ("scaffold", 1.0), ("scaffold-examples", 2.0)],
)
def test_the_objective_decides_whether_clients_are_weighted_by_their_examples(name: str, omega: float) -> None:
    """omega = 4 * 8 / 16 = 2 for the objective by examples. For the uniform one it is 1, also with these numbers."""
    state = kept(ALL[name], fl.read_state(start()).trainable)
    context, expected = answered(name, 0, state, omega)
    result = train(name, 0, state, with_population)
    got = payloads(result.update)[training_pb2.PAYLOAD_KIND_DELTA]
    assert equal(got, {**expected.payloads["delta"], **expected.buffers})
    after = ALL[name].next_client_state(context, expected)
    assert result.next_state is not None
    assert all(equal(result.next_state.at(1.0)[symbol], after[symbol]) for symbol in after)


def test_a_weighted_objective_needs_the_population() -> None:
    """Without the population's examples the steps cannot be weighted, and the client refuses the work."""
    with pytest.raises(WorkFailed, match="expected population and population_examples over 0 for feddyn") as failed:
        train("feddyn-examples")
    assert failed.value.reason == pb.FAILURE_REASON_UNSUPPORTED


def test_the_state_of_another_model_is_lost() -> None:
    """A state with the tensors of another model is not used."""
    with pytest.raises(WorkFailed, match="client state h_i: expected the tensors of the model") as failed:
        train("feddyn", state={"h_i": {"w": torch.zeros(1)}})
    assert failed.value.reason == pb.FAILURE_REASON_STATE_LOST


@pytest.mark.parametrize(
    ("name", "last", "batches"),
    [("mime", 2, 3), ("mimelite", 2, 9), ("mimelite", 5, 9), ("scaffold-I", 2, 9), ("fedavg", 5, 6)],
)
def test_work_can_be_ended_at_every_batch(name: str, last: int, batches: int) -> None:
    """Three batches of a full gradient, where there is one, and two epochs of three steps, where there are any."""
    steps_made = []

    def on_step(step: int, steps: int) -> None:
        steps_made.append((step, steps))
        if step == last:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(name, on_step=on_step)
    assert steps_made == [(step, batches) for step in range(1, last + 1)]


@pytest.mark.parametrize("name", ["fedavg", "mime"])
def test_a_batch_of_one_with_batch_norm_is_explained(name: str) -> None:
    """Seven examples in batches of three leave a batch of one. The message names the remedy."""
    given = bundles(start(), down(METHODS[name], 0, fl.read_state(start()).trainable))
    trainer = Trainer(local_task(examples=7))
    with pytest.raises(WorkFailed, match="batch norm needs two examples in every batch.*Choose a batch_size") as failed:
        trainer.train(assignment(METHODS[name]), given, None, lambda step, steps: None)
    assert failed.value.reason == pb.FAILURE_REASON_TASK_ERROR


class Returning(SmallTask):
    """A task whose loss returns something else."""

    def __init__(self, returned: Callable[[torch.Tensor], Any]) -> None:
        self._returned = returned

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        """What the test asks for, of the right loss."""
        return self._returned(super().loss(output, target))


@pytest.mark.parametrize(
    ("returned", "came"),
    [
        (lambda loss: None, r"None: is there a return\?"),
        (lambda loss: (loss, 1), "tuple"),
        (lambda loss: loss.expand(3), r"one of shape \[3\]: use \.mean\(\)"),
        (lambda loss: loss.detach(), "one without a gradient: it was detached"),
        (lambda loss: loss.item(), "float"),
    ],
    ids=["none", "tuple", "vector", "detached", "number"],
)
def test_a_loss_that_is_no_loss_is_explained(returned: Callable[[torch.Tensor], Any], came: str) -> None:
    """The message says what was expected and what came, on every device the same."""
    local = replace(local_task(), task=Returning(returned))
    with pytest.raises(WorkFailed, match=rf"loss\(\): expected a tensor .*, got {came}") as failed:
        Trainer(local).train(assignment(METHODS["fedavg"]), bundles(start()), None, lambda step, steps: None)
    assert failed.value.raised is not None
    assert failed.value.raised.error_type == "ValueError"


def test_labels_as_text_are_explained() -> None:
    """The batch is no pair of tensors then, and the model gets all parts: the message says so."""
    data = Samples([(torch.zeros(3), "cat"), (torch.ones(3), "dog")])
    with pytest.raises(
        WorkFailed, match=r"got all 2 parts of a batch, of the types Tensor, (tuple|list), .* not as text"
    ):
        Trainer(replace(local_task(), train=data)).train(
            assignment(METHODS["fedavg"]), bundles(start()), None, lambda step, steps: None
        )


def test_trainers_may_share_a_model() -> None:
    """Two devices that share one model have the same results as with separate models."""
    shared, given, wanted = start(), bundles(start()), assignment(METHODS["fedavg"])
    for seed in (1, 2, 1):
        alone = Trainer(local_task(seed)).train(wanted, given, None, lambda step, steps: None)
        together = Trainer(local_task(seed), shared).train(wanted, given, None, lambda step, steps: None)
        assert alone.update.pieces == together.update.pieces


@pytest.mark.parametrize(("name", "exchange"), EXCHANGES)
def test_bundles_and_updates_are_not_changed(name: str, exchange: int) -> None:
    """Bundles are kept for the next work, and updates until they are written. Later training changes neither."""
    algorithm, model = METHODS[name], start()
    given = bundles(model, down(algorithm, exchange, fl.read_state(model).trainable))
    state = kept(algorithm, fl.read_state(model).trainable)
    trainer, wanted = Trainer(local_task()), assignment(algorithm, exchange)
    fetched = {kind: bytes(pack(bundle.tensors, bundle.layout)) for kind, bundle in given.items()}
    first = trainer.train(wanted, given, state, lambda step, steps: None).update
    before = [bytes(piece) for piece in first.pieces]
    wanted.training.seed += 1
    second = trainer.train(wanted, given, state, lambda step, steps: None).update
    assert [bytes(piece) for piece in first.pieces] == before
    assert {kind: bytes(pack(bundle.tensors, bundle.layout)) for kind, bundle in given.items()} == fetched
    assert algorithm.exchanges[exchange].passes or second.header.digest != first.header.digest


def _other_exchange(wanted: training_pb2.Assignment) -> None:
    wanted.key.exchange = 2


def _other_order(wanted: training_pb2.Assignment) -> None:
    wanted.payloads[:] = reversed(wanted.payloads)


def _small_limit(wanted: training_pb2.Assignment) -> None:
    # 16 + 4 + 8 + 8 numbers of four bytes are trained on; buffers 4 + 4 numbers and a count of eight bytes.
    wanted.max_update_bytes = 2 * (12 + 4 + 4 + 4 + 8) * 4 + 4 * 8 + 8 - 1


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (_other_exchange, pb.FAILURE_REASON_UNSUPPORTED, "exchange: expected 0 to 0 of 'mfl', got 2"),
        (_other_order, pb.FAILURE_REASON_UNSUPPORTED, "payloads: expected PAYLOAD_KIND_DELTA, PAYLOAD_KIND_CLIENT"),
        (_small_limit, pb.FAILURE_REASON_RESOURCES, "at most 295 bytes, this model needs 296"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_impossible_work_is_refused_before_any_step(change: Change, reason: int, words: str) -> None:
    """Refused are an unknown exchange, payloads in another order, and two payloads over the limit together."""
    with pytest.raises(WorkFailed, match=words) as failed:
        train("mfl", change=change, on_step=lambda step, steps: pytest.fail("a step was made"))
    assert failed.value.reason == reason


def test_a_direction_that_is_missing_or_another_model_s_is_refused() -> None:
    """MFL is refused without the server's momentum and with a momentum of other tensors."""
    trainer, wanted, model = Trainer(local_task()), assignment(METHODS["mfl"]), start()
    with pytest.raises(WorkFailed, match="expected the momentum u in addition to the model"):
        trainer.train(wanted, bundles(model), None, lambda step, steps: None)
    with pytest.raises(WorkFailed, match="RESOURCE_KIND_DIRECTION, the model here against the coordinator's"):
        trainer.train(wanted, bundles(model, {"w": torch.zeros(1)}), None, lambda step, steps: None)


def test_a_number_that_is_not_finite_is_not_sent() -> None:
    """A momentum with an infinity gives an infinite delta and client momentum. Neither is sent."""
    model = start()
    momentum = tree.full_like(fl.read_state(model).trainable, 0.0)
    given = bundles(model, momentum)
    next(iter(momentum.values())).flatten()[0] = torch.inf
    given[tensor_pb2.RESOURCE_KIND_DIRECTION] = Bundle(Layout.of(momentum, momentum.keys()), momentum)
    with pytest.raises(WorkFailed, match="expected (a )?finite") as failed:
        Trainer(local_task()).train(assignment(METHODS["mfl"]), given, None, lambda step, steps: None)
    assert failed.value.reason == pb.FAILURE_REASON_NOT_FINITE
