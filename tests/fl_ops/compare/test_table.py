"""The table file: what it comes to, and what is refused before anything runs."""

import pytest

from fl_ops.errors import Misused


def test_every_method_meets_every_split(read):
    """Two methods on two splits are four lines, split by split."""
    table = read(('even = { method = "iid" }', 'even = { method = "iid" }, odd = { method = "dirichlet" }'))
    lines = [(line.method.label, line.split) for line in table.lines()]
    assert lines == [("FedAvg", "even"), ("FedCM", "even"), ("FedAvg", "odd"), ("FedCM", "odd")]


def test_variants_are_all_combinations_and_the_first_values_come_first(read):
    """Two lists of two values are four settings, beside what is given."""
    tune = 'parameters = { weights = "examples" }\ntune = { alpha = [0.1, 0.3], eta_g = [1.0, 0.5] }'
    variants = read(("tune = { alpha = [0.1, 0.3] }", tune)).own.methods[1].variants()
    assert [(each["alpha"], each["eta_g"]) for each in variants] == [(0.1, 1.0), (0.1, 0.5), (0.3, 1.0), (0.3, 0.5)]
    assert {each["weights"] for each in variants} == {"examples"}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('label = "FedCM"', 'label = "FedAvg"', "expected labels of one method each, got FedAvg more than once"),
        ("seed = 9", "seed = 2", "none of them tuning.seed"),
        ("alpha = [0.1, 0.3]", "alpha = [0.1, 3.0]", "parameter 'alpha'"),
        ("alpha = [0.1, 0.3]", "alfa = [0.1]", "Did you mean 'alpha'?"),
        ('method = "iid"', 'method = "id"', "expected the partition method"),
        ("clients = 4", 'clients = 4, partition = { method = "iid" }', "splits and tuning have them"),
        ("stop = { rounds = 3 }", "stop = { round = 3 }", "round"),
        ("seeds = [1, 2]", "seed = 1\nseeds = [1, 2]", "seed: a table has seeds and tuning.seed instead"),
        ("last = 2", "lst = 2", "report.lst: unknown key, did you mean last?"),
        ('name = "fedcm"', 'name = "fedcm"\nlabl = "x"', "methods.1.labl: unknown key, did you mean label?"),
        ("tuning = {", "tuned = {", "tuned"),
    ],
)
def test_what_cannot_be_run_is_told_by_its_key(read, old, new, told):
    """A comparison of hours must not end over a word that could be seen in its first second."""
    with pytest.raises(Misused, match=r"small\.toml") as error:
        read((old, new))
    assert told in str(error.value)


def test_values_to_search_want_a_search(read):
    """Without [tuning] nobody would choose among them."""
    with pytest.raises(Misused, match="needs a section \\[tuning\\]"):
        read(("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2 }", ""))
