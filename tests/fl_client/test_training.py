"""The trainer: what it sends is what the method's client half gives, for every method and every exchange."""

from __future__ import annotations

import pytest
import torch

import algorithms as fl
from algorithms import tree
from fl_client.bundles import Bundle
from fl_client.errors import WorkFailed
from fl_client.training import Interrupted, Trainer
from protos.codec import Layout, digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import payload_kind
from tasks.batches import batches, seed_everything, whole
from tests.fl_client.devices import METHODS, assignment, bundles, local_task, payloads, start

EXCHANGES = [(name, j) for name, algorithm in METHODS.items() for j in range(len(algorithm.exchanges))]


def like(tensors, seed):
    """Random tensors laid out as others."""
    draw = torch.Generator().manual_seed(seed)
    return tree.map(lambda tensor: 0.1 * torch.randn(tensor.shape, generator=draw), tensors)


def down(algorithm, exchange, x):
    """What goes down beside x in a round whose server keeps something, after sums that came to something."""
    state = algorithm.init(x)
    state = state.replace(memory={symbol: like(x, i) for i, symbol in enumerate(state.memory)})
    return algorithm.exchanges[exchange].direction(state, {"cbar": like(x, 9)})


def kept(algorithm, x):
    """A client state that is not the first one; nothing where clients keep nothing."""
    return {symbol: like(x, 20) for symbol in algorithm.client_init(x)}


def train(name, exchange=0, state=None, change=None, on_step=lambda step, steps: None):
    """What a trainer makes of an assignment, changed by `change`."""
    algorithm, model, wanted = METHODS[name], start(), assignment(METHODS[name], exchange)
    if change is not None:
        change(wanted)
    given = bundles(model, down(algorithm, exchange, fl.read_state(model).trainable))
    return Trainer(local_task()).train(wanted, given, state, on_step)


def answered(name, exchange, state, omega=1.0):
    """What the method's client half gives directly, and what it was given."""
    algorithm, model, examples = METHODS[name], start(), local_task().train
    direction = down(algorithm, exchange, fl.read_state(model).trainable)
    context = fl.ClientContext(direction, state, omega)
    seed_everything(11)
    data = fl.LocalData(batches(examples, 3, 11, epochs=2), whole(examples, 3), local_task().task.loss)
    work = fl.Work(algorithm, context, fl.LocalSettings(0.1), exchange)
    return context, fl.answer(model, data, work)


def equal(got, expected):
    """Same names in the same order, and the same bits."""
    return list(got) == list(expected) and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("name", "exchange"), EXCHANGES)
def test_an_update_holds_what_the_method_answers(name, exchange):
    """Each payload of the exchange, bit for bit; deltas with the buffers behind them; digest and facts of the whole."""
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
def test_only_methods_with_client_states_give_a_next_one(name):
    """The next state of a full round is what the method makes of the answer, and None where nothing is kept."""
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
def test_a_clipped_round_leaves_the_state_of_the_clipped_delta(name):
    """A quarter of the delta counted: the blend of two states is the state that the method makes of that delta."""
    algorithm = METHODS[name]
    state = kept(algorithm, fl.read_state(start()).trainable)
    context, expected = answered(name, 0, state)
    after = algorithm.next_client_state(context, expected.admitted(0.25))
    torch.testing.assert_close(train(name, 0, state).next_state.at(0.25), dict(after), rtol=1e-5, atol=1e-7)


def test_without_a_kept_state_the_method_s_first_one_is_used():
    """FedDyn from no state is FedDyn from h_i = 0."""
    zero = {"h_i": tree.full_like(fl.read_state(start()).trainable, 0.0)}
    assert train("feddyn").update.pieces == train("feddyn", state=zero).update.pieces


def test_clients_are_weighted_by_their_examples_when_the_population_is_told():
    """N = 4 clients with 16 examples, 8 of them here: omega = 4 * 8 / 16 = 2 halves mu; without them it is 1."""

    def told(wanted):
        wanted.training.population, wanted.training.population_examples = 4, 16

    state = kept(METHODS["feddyn"], fl.read_state(start()).trainable)
    for change, omega in ((told, 2.0), (None, 1.0)):
        _, expected = answered("feddyn", 0, state, omega)
        got = payloads(train("feddyn", 0, state, change).update)[training_pb2.PAYLOAD_KIND_DELTA]
        assert equal(got, {**expected.payloads["delta"], **expected.buffers})


def test_the_state_of_another_model_is_lost():
    """A state whose tensors are not this model's is none to work from."""
    with pytest.raises(WorkFailed, match="client state h_i: expected the tensors of the model") as failed:
        train("feddyn", state={"h_i": {"w": torch.zeros(1)}})
    assert failed.value.reason == pb.FAILURE_REASON_STATE_LOST


@pytest.mark.parametrize(
    ("name", "last", "batches"),
    [("mime", 2, 3), ("mimelite", 2, 9), ("mimelite", 5, 9), ("scaffold-I", 2, 9), ("fedavg", 5, 6)],
)
def test_work_can_be_ended_at_every_batch(name, last, batches):
    """Three batches of a full gradient, where there is one, and two epochs of three steps, where there are any."""
    told = []

    def on_step(step, steps):
        told.append((step, steps))
        if step == last:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(name, on_step=on_step)
    assert told == [(step, batches) for step in range(1, last + 1)]


@pytest.mark.parametrize("name", ["fedavg", "mime"])
def test_a_batch_of_one_that_batch_norm_cannot_take_is_told(name):
    """Seven examples in batches of three: the last has one, and the words say what to change."""
    given = bundles(start(), down(METHODS[name], 0, fl.read_state(start()).trainable))
    trainer = Trainer(local_task(examples=7))
    with pytest.raises(WorkFailed, match="batch norm needs two examples in every batch.*Choose a batch_size") as failed:
        trainer.train(assignment(METHODS[name]), given, None, lambda step, steps: None)
    assert failed.value.reason == pb.FAILURE_REASON_TASK_ERROR


def test_trainers_may_share_a_model():
    """Two devices that take turns at one model answer as they do with models of their own."""
    shared, given, wanted = start(), bundles(start()), assignment(METHODS["fedavg"])
    for seed in (1, 2, 1):
        alone = Trainer(local_task(seed)).train(wanted, given, None, lambda step, steps: None)
        together = Trainer(local_task(seed), shared).train(wanted, given, None, lambda step, steps: None)
        assert alone.update.pieces == together.update.pieces


@pytest.mark.parametrize(("name", "exchange"), EXCHANGES)
def test_what_was_made_and_what_was_fetched_stay_as_they_were(name, exchange):
    """Bundles are kept for the next work and updates until they are written: training again changes neither."""
    algorithm, model = METHODS[name], start()
    given = bundles(model, down(algorithm, exchange, fl.read_state(model).trainable))
    state = kept(algorithm, fl.read_state(model).trainable)
    trainer, wanted = Trainer(local_task()), assignment(algorithm, exchange)
    fetched = {kind: bytes(bundle.data) for kind, bundle in given.items()}
    first = trainer.train(wanted, given, state, lambda step, steps: None).update
    before = [bytes(piece) for piece in first.pieces]
    wanted.training.seed += 1
    second = trainer.train(wanted, given, state, lambda step, steps: None).update
    assert [bytes(piece) for piece in first.pieces] == before
    assert {kind: bytes(bundle.data) for kind, bundle in given.items()} == fetched
    assert algorithm.exchanges[exchange].passes or second.header.digest != first.header.digest


def _other_exchange(wanted):
    wanted.key.exchange = 2


def _other_order(wanted):
    wanted.payloads[:] = reversed(wanted.payloads)


def _small_limit(wanted):
    # 16 + 4 + 8 + 8 numbers of four bytes are trained on; buffers 4 + 4 numbers and a count of eight bytes.
    wanted.max_update_bytes = 2 * (12 + 4 + 4 + 4 + 8) * 4 + 4 * 8 + 8 - 1


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (_other_exchange, pb.FAILURE_REASON_UNSUPPORTED, "exchange: expected 0 to 0 of 'mfl', got 2"),
        (_other_order, pb.FAILURE_REASON_UNSUPPORTED, "payloads: expected PAYLOAD_KIND_DELTA, PAYLOAD_KIND_CLIENT"),
        (_small_limit, pb.FAILURE_REASON_RESOURCES, "at most 295 bytes, this model's has 296"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_answered_is_refused_before_any_step(change, reason, words):
    """An exchange that the method has not, payloads in another order, two payloads over the limit together."""
    with pytest.raises(WorkFailed, match=words) as failed:
        train("mfl", change=change, on_step=lambda step, steps: pytest.fail("a step was made"))
    assert failed.value.reason == reason


def test_a_direction_that_is_missing_or_another_model_s_is_refused():
    """MFL without the server's momentum cannot be done; a momentum of other tensors is not taken for it."""
    trainer, wanted, model = Trainer(local_task()), assignment(METHODS["mfl"]), start()
    with pytest.raises(WorkFailed, match="expected the momentum u beside the model"):
        trainer.train(wanted, bundles(model), None, lambda step, steps: None)
    with pytest.raises(WorkFailed, match="RESOURCE_KIND_DIRECTION, the model here against the coordinator's"):
        trainer.train(wanted, bundles(model, {"w": torch.zeros(1)}), None, lambda step, steps: None)


def test_a_number_that_is_not_finite_is_not_sent():
    """A momentum with an infinity comes back in the delta and in the client's momentum: neither goes up."""
    model = start()
    momentum = tree.full_like(fl.read_state(model).trainable, 0.0)
    given = bundles(model, momentum)
    held = given[tensor_pb2.RESOURCE_KIND_DIRECTION]
    data = bytearray(held.data)
    data[0:4] = torch.tensor([torch.inf]).numpy().tobytes()
    given[tensor_pb2.RESOURCE_KIND_DIRECTION] = Bundle(Layout.of(momentum, momentum.keys()), data)
    with pytest.raises(WorkFailed, match="expected (a )?finite") as failed:
        Trainer(local_task()).train(assignment(METHODS["mfl"]), given, None, lambda step, steps: None)
    assert failed.value.reason == pb.FAILURE_REASON_NOT_FINITE
