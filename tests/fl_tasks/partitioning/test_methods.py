"""Partitions of a data set among clients."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_tasks import PartitionSpec, TaskError, make_partition, training_groups, training_labels
from tests.fl_tasks.tiny import Tiny

SPECS: dict[str, dict[str, Any]] = {
    "dirichlet": {"method": "dirichlet"},
    "dirichlet, prior": {"method": "dirichlet", "prior_scaled": True},
    "dirichlet, unequal": {"method": "dirichlet", "sigma": 0.7},
    "hsu": {"method": "dirichlet-hsu"},
    "hsu, rotated": {"method": "dirichlet-hsu", "rotate": True},
    "hsu, rotated, unequal": {"method": "dirichlet-hsu", "rotate": True, "sigma": 0.7},
    "by class": {"method": "dirichlet-class", "min_examples": 0},
    "classes": {"method": "classes", "classes": 1},
    "classes, unequal": {"method": "classes", "classes": 1, "sigma": 3.0},
    "shards": {"method": "shards"},
    "shards, unequal": {"method": "shards", "sigma": 0.7},
    "iid": {"method": "iid"},
    "iid, stratified": {"method": "iid", "stratified": True},
    "iid, unequal": {"method": "iid", "sigma": 30.0},
    "natural": {"method": "natural"},
}
EQUAL = ["dirichlet", "dirichlet, prior", "hsu", "hsu, rotated", "classes"]
"""Methods with floor(M / N) examples for each client; all others assign every example."""

NEEDED = {"natural": 3, "shards": 2}
"""Fewest examples per client with which each client has some: a group of three, two shards of one."""


def partitioned(name: str, labels: Tensor, clients: int, **fields: Any) -> list[Tensor]:
    """The partition by the spec of that name; groups are triples of neighbours."""
    return make_partition(
        PartitionSpec(**SPECS[name], clients=clients, **fields), labels, torch.arange(len(labels)) // 3
    )


@given(
    name=st.sampled_from(list(SPECS)),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    clients=st.integers(1, 12),
    alpha=st.sampled_from([1e-8, 1e-3, 0.3, 100.0]),
)
@settings(max_examples=150, deadline=None)
def test_no_example_is_given_twice(name: str, counts: list[int], clients: int, alpha: float) -> None:
    """For any classes and clients, shards are disjoint and in range, and equal or complete as the method promises."""
    labels = torch.repeat_interleave(torch.arange(len(counts)) * 3, torch.tensor(counts))
    if len(labels) < clients * NEEDED.get(name, 1):
        return
    parts = partitioned(name, labels, clients, seed=1, alpha=alpha)
    assigned = torch.cat(parts).tolist()
    assert len(parts) == clients
    assert len(set(assigned)) == len(assigned)
    assert set(assigned) <= set(range(len(labels)))
    if name in EQUAL:
        assert {len(labels) // clients} == {len(part) for part in parts}
    else:
        assert len(assigned) == len(labels)
    assert name == "by class" or min(len(part) for part in parts) > 0


@pytest.mark.parametrize("name", SPECS)
def test_the_seed_decides(labels: Tensor, name: str) -> None:
    """The same spec gives the same split, another seed gives another."""
    first, again, other = (partitioned(name, labels, 10, seed=seed) for seed in (4, 4, 5))
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("dirichlet", "8941aefb34b25c63"),
        ("dirichlet, prior", "ae1c28aa45b9fd1a"),
        ("dirichlet, unequal", "93408c00c68567b2"),
        ("hsu", "5de158dd7a5023d6"),
        ("hsu, rotated", "fcdfe868fc868ad0"),
        ("hsu, rotated, unequal", "09f1199d54f8fd13"),
        ("by class", "982fa74e29a07ccb"),
        ("classes", "d6f9330c508ff51b"),
        ("classes, unequal", "1abdb4c86da944e3"),
        ("shards", "edf5fa53a9457959"),
        ("shards, unequal", "736fad800673b61f"),
        ("iid", "bfa8f7a2874e1aac"),
        ("iid, stratified", "a1b0ffc441a82997"),
        ("iid, unequal", "a3fd4bbbb0efe7ec"),
        ("natural", "ea83a5cf02a77fa9"),
    ],
)
def test_splits_in_the_field_stay_as_they_are(labels: Tensor, name: str, digest: str) -> None:
    """Devices that partition by a seed must not share examples after an upgrade: these splits were recorded."""
    parts = partitioned(name, labels, 10)
    assert digest == hashlib.sha256(str([part.tolist() for part in parts]).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, r'"natural" needs group numbers.*train_groups\(\)'),
        (torch.arange(5), "a group number for each of 6 examples, got 5"),
        (torch.rand(6), "one group number for each example, got torch.float32"),
        (torch.zeros(6).long(), "at least one group for each of 2 clients, got 1 groups"),
    ],
    ids=["none", "too few", "floats", "one"],
)
def test_groups_must_fit(groups: Tensor | None, message: str) -> None:
    """Data without valid groups is refused, with the remedy or the received value."""
    with pytest.raises(TaskError, match=message):
        make_partition(PartitionSpec("natural", 2), torch.zeros(6).long(), groups)


def test_groups_come_from_the_task(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """The groups come from the task's train_groups; a task without it has none."""
    assert training_groups(tiny) is None
    expected = torch.tensor([7])
    monkeypatch.setattr(tiny, "train_groups", lambda: expected, raising=False)
    assert training_groups(tiny) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "hetero"}, 'dirichlet, dirichlet-hsu, .* natural, got "hetero"'),
        ({"rotate": True}, '"iid" does not read rotate: it takes stratified, sigma'),
        ({"method": "natural", "sigma": 1.0, "classes": 3}, "does not read classes, sigma: it takes no options"),
        ({"method": "dirichlet-class", "sigma": 1.0}, "does not read sigma: it takes alpha, min_examples"),
        ({"stratified": True, "sigma": 1.0}, "stratified with sigma = 1.0"),
        ({"sigma": -1.0}, "sigma of 0 or more, got -1.0"),
        ({"method": "classes", "classes": 0}, "1 or more classes .* got 0 and 10"),
        ({"clients": 0}, "1 or more clients, got 0"),
        ({"alpha": 0.0}, "alpha over 0, got 0.0"),
        ({"alpha": float("nan")}, "alpha over 0, got nan"),
        ({"seed": -1}, "seed of 0 or more, got -1"),
    ],
)
def test_an_invalid_spec_is_refused(changes: dict[str, Any], message: str) -> None:
    """The error has the expected and the actual value."""
    with pytest.raises(TaskError, match=message):
        PartitionSpec(**{"method": "iid", "clients": 2, **changes})


def test_there_must_be_an_example_for_each_client() -> None:
    """Three examples cannot be partitioned among four clients."""
    with pytest.raises(TaskError, match="each of 4 clients, got 3"):
        make_partition(PartitionSpec("iid", 4), torch.arange(3))


@pytest.mark.parametrize("labels", [torch.rand(10), torch.zeros(10, 2).long()], ids=["floats", "matrix"])
def test_only_class_numbers_can_be_partitioned(labels: Tensor) -> None:
    """Targets that are no class numbers are refused with their dtype and shape."""
    with pytest.raises(TaskError, match="one class number for each example, got"):
        make_partition(PartitionSpec("shards", 2), labels)


def test_labels_come_from_the_whole_training_set(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """The task's train_labels is used if it exists; otherwise the targets of all training data."""
    assert torch.equal(tiny.examples.targets, training_labels(tiny))
    monkeypatch.setattr(tiny, "train_labels", lambda: torch.tensor([7]), raising=False)
    assert training_labels(tiny).tolist() == [7]
