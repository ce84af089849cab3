"""The table file: its content, and errors before any run."""

from __future__ import annotations

import pytest

from fl_ops.errors import UsageError
from tests.fl_ops.compare.conftest import Read


def test_every_method_meets_every_split(read: Read) -> None:
    """Two methods on two splits are four lines, split by split."""
    table = read(('even = { method = "iid" }', 'even = { method = "iid" }, odd = { method = "dirichlet" }'))
    pairs = [(experiment.method.label, experiment.split) for experiment in table.experiments()]
    assert pairs == [("FedAvg", "even"), ("FedCM", "even"), ("FedAvg", "odd"), ("FedCM", "odd")]


def test_a_section_for_some_splits(read: Read) -> None:
    """The same label has one setting on one split and another on the other one."""
    table = read(
        ('even = { method = "iid" }', 'even = { method = "iid" }, odd = { method = "dirichlet" }'),
        ('label = "FedAvg"', 'label = "FedCM"\nsplits = ["odd"]'),
        ('name = "fedcm"', 'name = "fedcm"\nsplits = ["even"]'),
    )
    pairs = [(experiment.method.label, experiment.method.name, experiment.split) for experiment in table.experiments()]
    assert pairs == [("FedCM", "fedcm", "even"), ("FedCM", "fedavg", "odd")]


def test_variants_are_all_combinations_and_the_first_values_come_first(read: Read) -> None:
    """Two lists of two values make four settings, each with the fixed parameters."""
    tune = 'parameters = { weights = "examples" }\ntune = { alpha = [0.1, 0.3], eta_g = [1.0, 0.5] }'
    variants = read(("tune = { alpha = [0.1, 0.3] }", tune)).spec.methods[1].variants(0.1)
    assert [(variant.parameters["alpha"], variant.parameters["eta_g"]) for variant in variants] == [
        (0.1, 1.0),
        (0.1, 0.5),
        (0.3, 1.0),
        (0.3, 0.5),
    ]
    assert {variant.parameters["weights"] for variant in variants} == {"examples"}


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
        (
            'name = "fedcm"',
            'name = "fedcm"\nsplits = ["odd"]',
            "methods.FedCM: expected splits of this table, even; got odd",
        ),
        ('name = "fedcm"', 'name = "fedcm"\npublished = { odd = 0.5 }', "expected splits of this table, even; got odd"),
        ("extend = 0", "validation_every = 1", "tuning.validation_every: expected 0, for none, or 2 or more, got 1"),
        ("extend = 0", "judge_seeds = [7]", "tuning.judge_seeds: expected two or more different seeds"),
        ("extend = 0", "judge_seeds = [7, 2]", "none of the final ones [1, 2], got [7, 2]"),
        (
            "tune = { alpha = [0.1, 0.3] }",
            "tune = { max_gradient_norm = [0, -1] }",
            "methods.FedCM, values of [local]: max_gradient_norm: expected",
        ),
        (
            "tune = { alpha = [0.1, 0.3] }",
            "local = { max_gradient_nrm = 1 }",
            "max_gradient_nrm: unknown key, did you mean max_gradient_norm?",
        ),
        (
            "tune = { alpha = [0.1, 0.3] }",
            "round = { clients_per_round = 0 }",
            "methods.FedCM, values of [round]: clients_per_round: expected",
        ),
        (
            "tune = { alpha = [0.1, 0.3] }",
            'privacy = { unit = "client" }',
            "methods.FedCM, values of [privacy]: noise_multiplier: expected",
        ),
        ("tune = { alpha = [0.1, 0.3] }", "local = { learning_rate = 0.1 }", "use learning_rates for this method"),
    ],
)
def test_an_invalid_table_is_reported_by_its_key(read: Read, old: str, new: str, expected: str) -> None:
    """An error is reported at the start, not after hours of runs."""
    with pytest.raises(UsageError, match=r"small\.toml") as error:
        read((old, new))
    assert expected in str(error.value)


def test_clipping_and_decay_of_a_method_are_its_own(read: Read) -> None:
    """Two tuned values of clipping and one fixed decay: runs of this method alone have them."""
    section = "tune = { max_gradient_norm = [0, 1] }\nlocal = { learning_rate_decay = 0.5 }"
    table = read(("tune = { alpha = [0.1, 0.3] }", section))
    values = [table.local(variant) for variant in table.spec.methods[1].variants(0.3)]
    assert [(one["max_gradient_norm"], one["learning_rate_decay"], one["learning_rate"]) for one in values] == [
        (0.0, 0.5, 0.3),
        (1.0, 0.5, 0.3),
    ]
    assert table.local(table.first_choice(table.spec.methods[0]))["learning_rate_decay"] == 1.0


def test_steps_of_a_method_replace_the_epochs_of_all(read: Read) -> None:
    """A method may have an amount of work of its own, in either unit."""
    for shared, own, expected in (
        ("", "steps = 5", (None, 5)),
        (", epochs = 3", "steps = 5", (None, 5)),
        (", steps = 5", "epochs = 3", (3, None)),
    ):
        table = read(
            ("local = { learning_rate = 0.1 }", f"local = {{ learning_rate = 0.1{shared} }}"),
            ("tune = { alpha = [0.1, 0.3] }", f"local = {{ {own} }}"),
        )
        local = table.local(table.first_choice(table.spec.methods[1]))
        assert (local["epochs"], local["steps"]) == expected


def test_a_search_without_validation_withholds_nothing(read: Read) -> None:
    """With validation_every = 0 the short runs have the clients of the final ones."""
    table = read(("extend = 0", "validation_every = 0"))
    assert table.spec.tuning is not None
    assert table.simulation("even", table.spec.tuning.validation_every) == table.simulation("even")


def test_a_method_without_a_search_may_have_its_own_rate(read: Read) -> None:
    """The papers' tables are not tuned; a method's own rate replaces that of [local]."""
    table = read(
        ("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2, extend = 0 }", ""),
        ("tune = { alpha = [0.1, 0.3] }", "local = { learning_rate = 0.3 }"),
    )
    assert [table.first_choice(method).learning_rate for method in table.spec.methods] == [0.1, 0.3]


def test_values_to_search_need_a_search(read: Read) -> None:
    """Without [tuning] there is no choice between them."""
    with pytest.raises(UsageError, match="needs a section \\[tuning\\]"):
        read(("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2, extend = 0 }", ""))
