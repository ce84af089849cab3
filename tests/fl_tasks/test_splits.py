"""Each method of partitioning: classes and sizes of the clients' shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fl_tasks import PartitionSpec, TaskError, make_partition
from fl_tasks.partitioning.spec import Method


def class_counts(labels: Tensor, parts: list[Tensor]) -> list[list[int]]:
    """How many examples of each class each client has, [N][C]."""
    return [labels[part].bincount(minlength=int(labels.max()) + 1).tolist() for part in parts]


def test_small_alpha_gives_few_classes(labels: Tensor) -> None:
    """With 50 clients of 20 examples, alpha = 0.01 leaves hardly more than a class a client, alpha = 100 nearly ten."""
    spread = {}
    for alpha in (0.01, 100.0):
        parts = make_partition(PartitionSpec("dirichlet", 50, 0, alpha), labels)
        spread[alpha] = sum(len(labels[part].unique()) for part in parts) / 50
    assert spread[0.01] < 3
    assert spread[100.0] > 8


def test_dirichlet_has_the_spread_of_its_alpha() -> None:
    """Among 1,000 clients with 20 examples of two classes, one class's share has variance 0.131 at alpha = 0.5.

    q ~ Beta(1/2, 1/2) has variance 1/8, and 20 draws from it add E[q (1 - q)] / 20 = (1/8) / 20. The variance of 1,000
    such shares strays by 0.003; six times that is allowed. A concentration divided by the classes would give 0.171.
    """
    labels = torch.arange(20_000) % 2
    parts = make_partition(PartitionSpec("dirichlet", 1000, alpha=0.5), labels)
    shares = torch.stack([labels[part].double().mean() for part in parts])
    assert shares.var().item() == pytest.approx(1 / 8 + 1 / 160, abs=0.018)


def test_prior_scaled_is_the_scale_of_hsu() -> None:
    """With two equal classes prior-scaled alpha = 1 is Dir(1/2, 1/2): example for example the split of alpha = 0.5."""
    labels = torch.arange(200) % 2
    scaled = make_partition(PartitionSpec("dirichlet", 10, alpha=1.0, prior_scaled=True), labels)
    plain = make_partition(PartitionSpec("dirichlet", 10, alpha=0.5), labels)
    assert all(map(torch.equal, scaled, plain))


def test_the_prior_is_that_of_the_data() -> None:
    """At alpha = 10,000 q is the prior: of 9 in 10 examples in class 0 every client has its share, within a few."""
    labels = (torch.arange(2000) % 10 == 0).long()
    parts = make_partition(PartitionSpec("dirichlet", 10, alpha=1e4, prior_scaled=True), labels)
    assert all(abs(ones - 20) < 15 for _, ones in class_counts(labels, parts))


@pytest.mark.parametrize(("rotate", "low", "high"), [(False, 4, 7.5), (True, -1.5, 1.5)])
def test_hsu_gives_the_remainder_to_the_last(labels: Tensor, rotate: bool, low: float, high: float) -> None:
    """At alpha = 10 the first of 50 clients has nearly all classes, the last the remainder; in turn they are alike.

    Numbers of classes among 20 examples: over 60 seeds the difference was 5.7 and -0.3, with deviation 1.5 and 1.2, of
    which a mean over 20 seeds has 0.3.
    """
    first = last = 0
    for seed in range(20):
        parts = make_partition(PartitionSpec("dirichlet-hsu", 50, seed, alpha=10.0, rotate=rotate), labels)
        first, last = first + len(labels[parts[0]].unique()), last + len(labels[parts[-1]].unique())
    assert low < (first - last) / 20 < high


def test_by_class_every_client_has_enough(labels: Tensor) -> None:
    """At alpha = 0.1 sizes differ widely, yet no client has fewer than 10."""
    sizes = [len(part) for part in make_partition(PartitionSpec("dirichlet-class", 10, alpha=0.1), labels)]
    assert min(sizes) >= 10
    assert max(sizes) > 3 * min(sizes)


@pytest.mark.parametrize(
    ("clients", "alpha", "why"),
    [(101, 1.0, "there are not enough of them"), (50, 1e-3, "none of 1000 draws achieved it")],
)
def test_an_impossible_search_ends(labels: Tensor, clients: int, alpha: float, why: str) -> None:
    """1,000 examples are 9 for each of 101 clients; ten classes that go whole to one client never reach 50."""
    with pytest.raises(TaskError, match=f"10 or more of 1000 examples for each of {clients} .*{why}: raise alpha"):
        make_partition(PartitionSpec("dirichlet-class", clients, alpha=alpha), labels)


def test_by_class_has_the_spread_of_its_alpha() -> None:
    """Dir(ones(100)) gives a client's share of one class variance (1/100)(99/100)/101 = 9.8e-5.

    Shares of 200 classes of 1,000 examples are 20,000 values. Their variance varies by 2 %; six times that is allowed.
    """
    labels = torch.arange(200_000) % 200
    parts = make_partition(PartitionSpec("dirichlet-class", 100, alpha=1.0), labels)
    shares = torch.tensor(class_counts(labels, parts)).double() / 1000
    assert shares.var().item() == pytest.approx(9.8e-5, rel=0.12)


def test_clients_have_the_classes_they_drew(labels: Tensor) -> None:
    """Of 100 clients with 3 of ten classes most have exactly these; others replace an exhausted class."""
    held = [sum(count > 0 for count in row) for row in class_counts(labels, partition_by_classes(labels, 3))]
    assert sorted(held)[50] == 3
    assert min(held) >= 1


def partition_by_classes(labels: Tensor, classes: int) -> list[Tensor]:
    """100 clients with a number of classes each."""
    return make_partition(PartitionSpec("classes", 100, classes=classes), labels)


def test_more_classes_than_there_are_cannot_be_drawn(labels: Tensor) -> None:
    """There are only ten classes."""
    with pytest.raises(TaskError, match="up to 10 classes for each client, as the data has, got 11"):
        partition_by_classes(labels, 11)


@pytest.mark.parametrize("clients", [10, 7])
def test_stratified_clients_have_as_many_of_each_class(labels: Tensor, clients: int) -> None:
    """100 of a class over 10 clients are 10 each; over 7 they are 14 or 15."""
    counts = class_counts(labels, make_partition(PartitionSpec("iid", clients, stratified=True), labels))
    assert {100 // clients, -(-100 // clients)} == {count for row in counts for count in row}


def test_unequal_sizes_are_lognormal() -> None:
    """The logarithms of 500 sizes have deviation sigma = 0.5, which strays by 0.016; six times that is allowed."""
    parts = make_partition(PartitionSpec("iid", 500, sigma=0.5), torch.zeros(100_000).long())
    sizes = torch.tensor([len(part) for part in parts]).double()
    assert sizes.sum() == 100_000
    assert sizes.log().std().item() == pytest.approx(0.5, abs=0.1)


def test_one_client_can_take_nearly_all() -> None:
    """At sigma = 100 the other clients have one example each."""
    sizes = sorted(len(part) for part in make_partition(PartitionSpec("iid", 10, sigma=100.0), torch.arange(50)))
    assert sizes[0] == 1
    assert sum(sizes) == 50


def test_a_group_is_a_client() -> None:
    """With as many clients as writers each holds one writer's examples, in the order of their numbers."""
    groups = torch.tensor([70, 5, 70, 12, 5, 70])
    parts = make_partition(PartitionSpec("natural", 3, seed=9), torch.zeros(6).long(), groups)
    assert [part.tolist() for part in parts] == [[1, 4], [3], [0, 2, 5]]


def test_groups_are_never_split() -> None:
    """Seven groups over three clients are 3, 2 and 2 whole ones."""
    groups = torch.arange(70) % 7
    parts = make_partition(PartitionSpec("natural", 3), torch.zeros(70).long(), groups)
    held = [set(groups[part].tolist()) for part in parts]
    assert [len(part) // 10 for part in parts] == [len(one) for one in held] == [3, 2, 2]


@pytest.mark.parametrize("method", ["dirichlet", "dirichlet-hsu"])
def test_a_client_whose_classes_are_used_up_is_still_filled(method: Method) -> None:
    """At alpha = 1e-8 each client has one class: ten clients with three classes have to fill up from the remainder."""
    parts = make_partition(PartitionSpec(method, 10, 3, 1e-8), torch.arange(90) % 3)
    assert [len(part) for part in parts] == [9] * 10


def test_shards_have_two_classes_if_sizes_divide(labels: Tensor) -> None:
    """Ten classes of 100 in 20 shards of 50: every client sees one or two classes."""
    parts = make_partition(PartitionSpec("shards", 10), labels)
    assert {1, 2} >= {len(labels[part].unique()) for part in parts}
    assert {100} == {len(part) for part in parts}
