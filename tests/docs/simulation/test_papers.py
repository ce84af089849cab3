"""docs/measurements/papers.md and its files: the settings are those of the papers, and every name is a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from algorithms import build
from algorithms.registry import METHODS
from fl_ops.compare.plan import Plan
from fl_ops.compare.table import Table, read_table
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_server.run_settings.spec import from_values
from fl_tasks import load_task
from tests.fl_tasks.built_in.leaf import PERSONS, WRITERS, write_celeba, write_femnist

DOCS = Path(__file__).parents[3] / "docs"
FILES = {path.stem: path for path in (DOCS / "measurements/papers").glob("*.toml")}
FULL = {
    "fedcm-cifar-10-100-clients": (100, 0.1, 50, 4000),
    "fedcm-cifar-10-500-clients": (500, 0.02, 50, 4000),
    "fl-simulator-cifar-10-100-clients": (100, 0.1, 50, 1000),
    "fl-simulator-cifar-10-200-clients": (200, 0.05, 25, 1000),
}
"""File -> (clients, probability of a client in a round, batch, rounds)."""

STUDIES = {
    "fedsam-cifar-10",
    "study-composition",
    "study-demon",
    "study-fedcm-100-clients",
    "study-fedcm-500-clients",
    "study-fedsam",
    "study-hsu",
    "study-hsu-participation",
}

DEMON = {
    "demon-femnist": ("writer", 0.001, 0.01, [0.793, 0.776, 0.839, 0.831, 0.849]),
    "demon-celeba": ("person", 0.0001, 0.001, [0.842, 0.894, 0.887, 0.906, 0.919]),
}
"""File -> (user, rate of the clients, rate of adaptive servers, published accuracies)."""

OVERVIEW = {"overview-least-squares"}
"""Least squares: methods as optimizers."""

COMPARED = {
    "fedavg",
    "fedadam",
    "scaffold",
    "feddyn",
    "fedprox",
    "fedcm",
    "fedsam",
    "mofedsam",
    "feddemon",
    "slowmo",
    "mimelite",
}


def names(table: Table) -> set[str]:
    """The methods of a table."""
    return {method.name for method in table.spec.methods}


def test_the_page_has_every_file() -> None:
    """There are FedCM's four files, Demon's two, least squares, the reduced one, the studies, and no other."""
    assert FILES.keys() == {*FULL, *DEMON, *OVERVIEW, "reduced-cifar-10", *STUDIES}
    page = (DOCS / "measurements/papers.md").read_text(encoding="utf-8")
    assert all(f"(papers/{name}.toml)" in page for name in FILES)


@pytest.mark.parametrize("name", sorted([*FILES, "fashion-mnist"]))
def test_a_file_names_real_methods_and_a_real_task_and_model(name: str) -> None:
    """It is read as by `fl compare`; the task is made with its options, which does not read its data."""
    table = read_table(FILES.get(name, DOCS / "measurements/results" / f"{name}.toml"))
    assert names(table) <= METHODS.keys()
    assert names(table) == COMPARED or name in {"fashion-mnist", *STUDIES, *DEMON, *OVERVIEW}
    task = load_task(table.run.task.name, table.run.task.options)
    assert sum(value.numel() for value in task.model().parameters()) > 0


@pytest.mark.parametrize("name", FULL)
def test_a_paper_setting_is_that_of_the_paper(name: str) -> None:
    """Clients, Bernoulli sampling, batch, epochs, rate and its decay, weight decay, model and rounds; no search."""
    table, run = read_table(FILES[name]), read_table(FILES[name]).run
    assert (table.spec.simulation.clients, run.round.rate, run.local.batch_size, run.stop.rounds) == FULL[name]
    assert (run.round.sampling, run.task.options["model"], table.spec.tuning) == ("bernoulli", "resnet18-gn", None)
    assert (run.local.epochs, run.local.learning_rate, run.local.weight_decay) == (5, 0.1, 1e-3)
    for method in table.spec.methods:
        decay = table.local(table.first_choice(method))["learning_rate_decay"]
        assert decay == (0.9995 if method.name == "feddyn" else 0.998)


@pytest.mark.parametrize(
    ("name", "label", "split", "published"),
    [
        ("fedcm-cifar-10-100-clients", "FedCM, feddyn_code", "Dirichlet 0.6", 0.8761),
        ("fedcm-cifar-10-500-clients", "FedAvg", "IID", 0.7472),
        ("fl-simulator-cifar-10-100-clients", "MoFedSAM, feddyn_code", "Dirichlet 0.1", 0.8158),
        ("fl-simulator-cifar-10-200-clients", "SCAFFOLD, feddyn_code", "Dirichlet 0.3", 0.8204),
    ],
)
def test_published_numbers_are_those_of_the_tables(name: str, label: str, split: str, published: float) -> None:
    """One number of each table; a method that a table does not have has none."""
    methods = read_table(FILES[name]).spec.methods
    assert [one.published[split] for one in methods if one.label == label and split in one.published] == [published]
    assert all(not one.published for one in methods if one.label == "SlowMo")


def test_a_method_with_a_direction_has_the_papers_order_and_programs_their_own() -> None:
    """FedCM's two readings are the first rows; a row named feddyn_code has that order, a row with a direction not."""
    for name in FULL:
        methods = read_table(FILES[name]).spec.methods
        assert [one.label for one in methods[:2]] == ["FedCM", "FedCM, feddyn_code"]
        for one in methods:
            order = one.parameters.get("order", "paper")
            named = one.label.endswith(", feddyn_code")
            assert order == ("feddyn_code" if named or one.name in {"feddyn", "fedprox"} else "paper")


def test_the_reduced_comparison_is_fair() -> None:
    """Twelve cells a method at full horizon, the same clips, first rates and seeds, and one effective decay."""
    table = read_table(FILES["reduced-cifar-10"])
    spec, tuning = table.spec, table.spec.tuning
    assert tuning is not None
    assert (tuning.cells, len(spec.seeds), spec.report.baseline) == (12, 5, "FedAvg")
    assert tuning.rounds == table.run.stop.rounds
    for method in spec.methods:
        assert sorted(map(str, method.tune["max_gradient_norm"])) == ["1.0", "10.0"]
        assert len(method.learning_rates or tuning.learning_rates) == 3
        for choice in method.variants(0.1):
            algorithm = build(method.name, **choice.parameters)
            assert table.local(choice)["weight_decay"] * algorithm.decay_factor == pytest.approx(1e-3)


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_the_rows_of_a_study_are_comparable(name: str) -> None:
    """All have one clipping and one effective decay, and each search has as many runs."""
    table = read_table(FILES[name])
    seen, rates = set(), set()
    for method in table.spec.methods:
        assert not method.tune
        rates.add(len(method.learning_rates or [0.0]))
        choice = table.first_choice(method)
        local, algorithm = table.local(choice), build(method.name, **choice.parameters)
        seen.add((local["max_gradient_norm"], round(local["weight_decay"] * algorithm.decay_factor, 9)))
    assert (len(seen), len(rates)) == (1, 1)


@pytest.mark.parametrize("name", DEMON)
def test_demons_setting_is_that_of_its_paper(name: str) -> None:
    """Five clients a round, batches of 10, a client for each user, and the published rates and accuracies."""
    user, rate, server_rate, published = DEMON[name]
    table, run = read_table(FILES[name]), read_table(FILES[name]).run
    methods = table.spec.methods
    assert [method.name for method in methods] == ["fedavg", "fedavgm", "feddemon", "fedadam", "feddemonadam"]
    assert [method.published[f"by {user}"] for method in methods] == published
    assert (run.round.clients_per_round, run.local.batch_size, run.local.learning_rate) == (5, 10, rate)
    assert [method.parameters.get("eta_g") for method in methods[3:]] == [server_rate] * 2
    assert {method.parameters.get("beta2") for method in methods[3:]} == {0.999}
    assert all(method.parameters.get("beta0", 0.9) == 0.9 for method in methods)


@pytest.mark.parametrize("name", DEMON)
def test_demons_files_run_on_leafs_files(name: str, tmp_path: Path) -> None:
    """Their options fit the task: on small files in LEAF's format each user is a client with its own data."""
    root = write_femnist(tmp_path) if name == "demon-femnist" else write_celeba(tmp_path)
    settings = Plan(read_table(FILES[name]), lambda cell: None).missing()[0].settings
    run = from_values(dict(settings["run"]))
    task = run.task.model_copy(update={"options": {**run.task.options, "data_root": root}})
    section = SimulationSection.model_validate(settings["simulation"])
    prepared = prepare(SimulationConfig(run.model_copy(update={"task": task}), section), 1)
    sizes = (WRITERS if name == "demon-femnist" else PERSONS).values()
    assert [(len(local.train), len(local.held_out)) for local in prepared.clients.values()] == [*sizes]
