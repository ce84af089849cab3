"""The table file: its content, and errors before any run."""

from __future__ import annotations

import pytest

from fl_ops.errors import UsageError
from tests.fl_ops.compare.conftest import Read


def test_every_method_meets_every_split(read: Read) -> None:
    """Two methods on two splits are four lines, split by split."""
    table = read(('even = { method = "iid" }', 'even = { method = "iid" }, odd = { method = "dirichlet" }'))
    pairs = [(each.method.label, each.split) for each in table.experiments()]
    assert pairs == [("FedAvg", "even"), ("FedCM", "even"), ("FedAvg", "odd"), ("FedCM", "odd")]


def test_variants_are_all_combinations_and_the_first_values_come_first(read: Read) -> None:
    """Two lists of two values make four settings, each with the fixed parameters."""
    tune = 'parameters = { weights = "examples" }\ntune = { alpha = [0.1, 0.3], eta_g = [1.0, 0.5] }'
    variants = read(("tune = { alpha = [0.1, 0.3] }", tune)).spec.methods[1].variants()
    assert [(each["alpha"], each["eta_g"]) for each in variants] == [(0.1, 1.0), (0.1, 0.5), (0.3, 1.0), (0.3, 0.5)]
    assert {each["weights"] for each in variants} == {"examples"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            'label = "FedCM"',
            'label = "FedAvg"',
            "expected a different label for each method, got FedAvg more than once",
        ),
        ("seed = 9", "seed = 2", "not tuning.seed"),
        ("alpha = [0.1, 0.3]", "alpha = [0.1, 3.0]", "parameter 'alpha'"),
        ("alpha = [0.1, 0.3]", "alfa = [0.1]", "Did you mean 'alpha'?"),
        ('method = "iid"', 'method = "id"', "expected the partition method"),
        ("clients = 4", 'clients = 4, partition = { method = "iid" }', "splits and tuning set them"),
        ("stop = { rounds = 3 }", "stop = { round = 3 }", "round"),
        ("seeds = [1, 2]", "seed = 1\nseeds = [1, 2]", "seed: a table has seeds and tuning.seed instead"),
        ("last = 2", "lst = 2", "report.lst: unknown key, did you mean last?"),
        (
            'name = "fedcm"',
            'name = "fedcm"\nschedules = { alpha = { kind = "cosine", end = 2.0 } }',
            "schedules.alpha: fedcm, parameter 'alpha': expected a number over 0 and at most 1; got 2.0",
        ),
        ('name = "fedcm"', 'name = "fedcm"\nlabl = "x"', "methods.1.labl: unknown key, did you mean label?"),
        ("tuning = {", "tuned = {", "tuned"),
    ],
)
def test_an_invalid_table_is_reported_by_its_key(read: Read, old: str, new: str, expected: str) -> None:
    """An error is reported at the start, not after hours of runs."""
    with pytest.raises(UsageError, match=r"small\.toml") as error:
        read((old, new))
    assert expected in str(error.value)


def test_values_to_search_need_a_search(read: Read) -> None:
    """Without [tuning] there is no choice between them."""
    with pytest.raises(UsageError, match="needs a section \\[tuning\\]"):
        read(("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2 }", ""))
