"""Splits of a data set over clients."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import PartitionSpec, TaskError, make_partition, training_labels
from tasks.partition import dirichlet_balanced

METHODS = ["dirichlet", "iid", "shards"]


@given(
    method=st.sampled_from(METHODS),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    clients=st.integers(1, 12),
    alpha=st.sampled_from([1e-8, 1e-3, 0.3, 100.0]),
)
@settings(max_examples=60, deadline=None)
def test_no_example_is_given_twice(method, counts, clients, alpha):
    """Whatever the classes and clients, shards are disjoint, in range, and floor(M/N) each where they are balanced."""
    labels = torch.repeat_interleave(torch.arange(len(counts)) * 3, torch.tensor(counts))
    if len(labels) < clients:
        return
    parts = make_partition(PartitionSpec(method, clients, 1, alpha), labels)
    dealt = torch.cat(parts)
    assert len(parts) == clients
    assert len(set(dealt.tolist())) == len(dealt)
    assert set(dealt.tolist()) <= set(range(len(labels)))
    if method == "dirichlet":
        assert {len(labels) // clients} == {len(part) for part in parts}
    else:
        assert len(dealt) == len(labels)


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_decides(labels, method):
    """The same spec gives the same split, another seed gives another."""
    first = make_partition(PartitionSpec(method, 10, seed=4), labels)
    again = make_partition(PartitionSpec(method, 10, seed=4), labels)
    other = make_partition(PartitionSpec(method, 10, seed=5), labels)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


@pytest.mark.parametrize(
    ("method", "digest"),
    [("dirichlet", "8941aefb34b25c63"), ("iid", "bfa8f7a2874e1aac"), ("shards", "edf5fa53a9457959")],
)
def test_splits_in_the_field_stay_as_they_are(labels, method, digest):
    """Devices that deal from a seed must not come to share examples after an upgrade: these splits were recorded."""
    parts = make_partition(PartitionSpec(method, 10, seed=0, alpha=0.3), labels)
    assert digest == hashlib.sha256(str([part.tolist() for part in parts]).encode()).hexdigest()[:16]


def test_small_alpha_gives_few_classes(labels):
    """With 50 clients of 20 examples, alpha = 0.01 leaves hardly more than a class a client, alpha = 100 nearly ten."""
    spread = {}
    for alpha in (0.01, 100.0):
        parts = make_partition(PartitionSpec("dirichlet", 50, 0, alpha), labels)
        spread[alpha] = sum(len(labels[part].unique()) for part in parts) / 50
    assert spread[0.01] < 3
    assert spread[100.0] > 8


def test_dirichlet_has_the_spread_of_its_alpha():
    """Among 1,000 clients with 20 examples of two classes, one class's share has variance 0.131 at alpha = 0.5.

    q ~ Beta(1/2, 1/2) has variance 1/8, and 20 draws from it add E[q (1 - q)] / 20 = (1/8) / 20. The variance of 1,000
    such shares strays by 0.003; six times that is allowed. A concentration divided by the classes would give 0.171.
    """
    labels = torch.arange(20_000) % 2
    parts = dirichlet_balanced(labels.numpy(), 1000, 0, 0.5)
    shares = torch.stack([labels[torch.from_numpy(part)].double().mean() for part in parts])
    assert shares.var().item() == pytest.approx(1 / 8 + 1 / 160, abs=0.018)


def test_a_client_whose_classes_are_used_up_is_still_filled():
    """Alpha = 1e-8 puts each client on one class: ten clients on three classes can only fill from what remains."""
    parts = make_partition(PartitionSpec("dirichlet", 10, 3, 1e-8), torch.arange(90) % 3)
    assert [len(part) for part in parts] == [9] * 10


def test_shards_have_two_classes_where_they_divide(labels):
    """Ten classes of 100 in 20 shards of 50: every client sees one or two classes."""
    parts = make_partition(PartitionSpec("shards", 10), labels)
    assert {1, 2} >= {len(labels[part].unique()) for part in parts}
    assert {100} == {len(part) for part in parts}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "hetero"}, 'dirichlet, iid, shards, got "hetero"'),
        ({"clients": 0}, "1 or more clients, got 0"),
        ({"alpha": 0.0}, "alpha over 0, got 0.0"),
        ({"alpha": float("nan")}, "alpha over 0, got nan"),
        ({"seed": -1}, "seed of 0 or more, got -1"),
    ],
)
def test_a_spec_without_sense_is_refused(changes, message):
    """The error says what was expected and what came."""
    with pytest.raises(TaskError, match=message):
        PartitionSpec(**{"method": "iid", "clients": 2, **changes})


def test_there_must_be_an_example_for_each_client():
    """Three examples cannot be dealt to four clients."""
    with pytest.raises(TaskError, match="each of 4 clients, got 3"):
        make_partition(PartitionSpec("iid", 4), torch.arange(3))


@pytest.mark.parametrize("labels", [torch.rand(10), torch.zeros(10, 2).long()], ids=["floats", "matrix"])
def test_only_class_numbers_can_be_dealt(labels):
    """Targets that are no class numbers are refused with their dtype and shape."""
    with pytest.raises(TaskError, match="one class number for each example, got"):
        make_partition(PartitionSpec("iid", 2), labels)


def test_labels_come_from_the_whole_training_set(tiny):
    """A task's own train_labels goes first; without it they are the targets of all training data."""
    assert torch.equal(tiny.examples.targets, training_labels(tiny))
    tiny.train_labels = lambda: torch.tensor([7])
    assert training_labels(tiny).tolist() == [7]
