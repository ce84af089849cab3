"""A real Prometheus that scrapes a real federation: every query has data, with the values of the runs' records."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from protos.fl.v1 import admin_pb2
from tests.monitoring.alert_files import rules
from tests.monitoring.federation import ROUNDS, RUNS, SIZE, MonitoredRuns, scraped_federation
from tests.monitoring.panels import Panel, annotation_queries, filled, panels
from tests.monitoring.programs import needed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

METRIC = re.compile(r"\b(?:fl|process)_\w+\b(?!:)")
"""The name of a metric, outside the name of a recorded rule."""
EMPTY_PANELS = {
    "Work that failed on devices": "no work fails on the devices here; they are killed",
    "Object store": "the coordinator's files are in its folder",
    "Privacy spent": "no run is private",
    "Counted updates of a client, of its due": "no client has had five due updates",
}
"""Panel without data here -> reason."""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitoredRuns]:
    """The executed scenario with all faults, once for all tests of this module."""
    needed("prometheus")
    with scraped_federation(tmp_path_factory.mktemp("scraped_federation")) as scenario:
        scenario.execute()
        yield scenario


def test_every_rule_is_evaluated_without_an_error(scenario: MonitoredRuns) -> None:
    """Prometheus reports each of them healthy, and each expression can be queried."""
    evaluated = scenario.prometheus.rules()
    assert len(evaluated) == len(list(rules()))
    assert [rule["name"] for rule in evaluated if rule["health"] != "ok" or rule.get("lastError")] == []
    for rule in rules():
        scenario.prometheus.query(rule["expr"])


def test_every_metric_of_a_rule_has_data(scenario: MonitoredRuns) -> None:
    """Every metric that a rule selects or records has data, so no rule is silent because of a wrong name."""
    named = {name for rule in rules() for name in METRIC.findall(rule["expr"])}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    silent = {
        name
        for name in named | recorded
        if not scenario.prometheus.query(f'last_over_time({{__name__="{name}"}}[10m])')
    }
    assert silent == set()


def test_only_the_expected_alert_fired(scenario: MonitoredRuns) -> None:
    """The alert of the failed run fires at once; all others were evaluated and do not fire."""
    assert scenario.prometheus.value('ALERTS{alertname="FlRunFailed", alertstate="firing", run="diverged"}') == 1
    assert scenario.prometheus.query('last_over_time(ALERTS{alertname!="FlRunFailed", alertstate="firing"}[10m])') == []


def test_metrics_of_the_undisturbed_run(scenario: MonitoredRuns) -> None:
    """The metrics of a run without faults equal its record."""
    run, rounds = scenario.server.run("undisturbed"), scenario.server.rounds("undisturbed")
    value = _values(scenario, "undisturbed", scenario.undisturbed_at)
    assert value("fl_round") == value("fl_rounds_total", outcome="committed") == run.rounds_done == ROUNDS
    assert value("fl_rounds_total", outcome="abandoned") == 0
    assert value("fl_attempts_total") == sum(row.attempts for row in rounds)
    assert value("fl_assignments_total", state="admitted") == sum(row.accepted for row in rounds) == ROUNDS * SIZE
    others = ("refused", "failed", "lost", "cancelled")
    assert {value("fl_assignments_total", state=state) for state in others} == {0}
    assert value("fl_round_seconds_count") == ROUNDS
    assert value("fl_round_seconds_sum") == pytest.approx(sum(row.seconds for row in rounds))
    assert value("fl_last_commit_timestamp_seconds") == pytest.approx(_unix(rounds[-1].committed), abs=1e-3)
    assert value("fl_training_loss") == pytest.approx(rounds[-1].training_loss)
    assert value("fl_run_state", state="completed") == 1
    assert value("fl_run_state_since_timestamp_seconds") == pytest.approx(_unix(run.ended), abs=1e-3)


def test_metrics_of_evaluations(scenario: MonitoredRuns) -> None:
    """The server's and the clients' metrics of the last round, and the best of all rounds."""
    run, rounds = scenario.server.run("undisturbed"), scenario.server.rounds("undisturbed")
    value = _values(scenario, "undisturbed", scenario.undisturbed_at)
    metrics = dict(rounds[-1].metrics)
    assert {"accuracy", "loss", "clients_accuracy_mean", "clients_evaluated"} <= metrics.keys()
    assert {name: value("fl_evaluation", metric=name) for name in metrics} == metrics
    assert value("fl_evaluation_best", metric="accuracy") == run.best.metrics["accuracy"]
    assert value("fl_evaluation_best", metric="loss") == min(row.metrics["loss"] for row in rounds)
    spread = {"mean": "mean", "deviation": "std", "worst_decile": "worst_decile"}
    for statistic, suffix in spread.items():
        measured = value("fl_client_evaluation", metric="accuracy", statistic=statistic)
        assert measured == metrics[f"clients_accuracy_{suffix}"]
    assert value("fl_evaluations_not_finite_total") == 0


def test_bytes_are_the_same_for_the_run_the_coordinator_and_the_daemons(scenario: MonitoredRuns) -> None:
    """During the first run its totals, both ends' counters and the daemons' work agree.

    The last model of 43 float32 values is fetched only for evaluation, after its round's record was closed.
    """
    run, seen = scenario.server.run("undisturbed"), scenario.prometheus
    assert run.bytes_up == ROUNDS * SIZE * 43 * 4
    of_rounds = sum(done.bytes_down for done in scenario.server.rounds("undisturbed"))
    assert run.bytes_down == of_rounds + SIZE * 43 * 4
    for direction, counted in (("up", run.bytes_up), ("down", run.bytes_down)):
        of_server = f'sum(last_over_time(fl_transfer_bytes_total{{direction="{direction}"}}[5s]))'
        of_daemons = f'sum(last_over_time(fl_client_transfer_bytes_total{{direction="{direction}"}}[5s]))'
        assert [seen.value(name, scenario.undisturbed_at) for name in (of_server, of_daemons)] == [counted] * 2
    trained = seen.value("sum(last_over_time(fl_client_rounds_trained_total[5s]))", scenario.undisturbed_at)
    assert trained == ROUNDS * SIZE


def test_metrics_of_refusals_have_their_reasons(scenario: MonitoredRuns) -> None:
    """One wrong shape and one NaN are counted as in the clients' records. The run of the second failed."""
    value = _values(scenario, "misshapen", scenario.killed_at)
    assert value("fl_updates_refused_total", reason="layout") == value("fl_assignments_total", state="refused") == 1
    assert value("fl_assignments_total", state="admitted") == scenario.server.rounds("misshapen")[0].accepted == 1
    value = _values(scenario, "diverged", scenario.killed_at)
    assert value("fl_updates_refused_total", reason="not_finite") == 1
    assert value("fl_run_state", state="failed") == 1
    assert scenario.server.run("diverged").state == admin_pb2.RUN_STATE_FAILED
    assert [scenario.server.client(f"raw-{number}").updates_refused for number in range(3)] == [1, 0, 1]
    assert scenario.prometheus.value("sum(last_over_time(fl_updates_refused_total[5s]))", scenario.killed_at) == 2


def test_metrics_after_a_killed_daemon_and_a_killed_coordinator(scenario: MonitoredRuns) -> None:
    """The sums of the counts before and after the kill equal the rounds' records."""
    rounds = scenario.server.rounds("faulted")
    before, after = (_values(scenario, "faulted", at) for at in (scenario.killed_at, time.time()))

    def both(name: str, **labels: str) -> float:
        return before(name, **labels) + after(name, **labels)

    assert both("fl_rounds_total", outcome="committed") == after("fl_round") == len(rounds) == ROUNDS
    assert both("fl_assignments_total", state="lost") == sum(row.dropped for row in rounds) == 1
    assert both("fl_assignments_total", state="admitted") == sum(row.accepted for row in rounds) == ROUNDS * SIZE - 1
    assert both("fl_attempts_total") == sum(row.attempts for row in rounds) == ROUNDS
    assert after("fl_last_commit_timestamp_seconds") == pytest.approx(_unix(rounds[-1].committed), abs=1e-3)
    assert after("fl_evaluation", metric="accuracy") == rounds[-1].metrics["accuracy"]
    assert scenario.prometheus.value("changes(namespace:fl_coordinator_start_time_seconds:max[10m])") == 1
    assert scenario.prometheus.value('min_over_time(up{job="fl-server"}[10m])') == 0


def test_expiry_of_certificates(scenario: MonitoredRuns) -> None:
    """The metrics have the ends of the coordinator's, the daemons' and the authority's certificates."""

    def ends(file: object) -> float:
        return x509.load_pem_x509_certificate(Path(str(file)).read_bytes()).not_valid_after_utc.timestamp()

    server, seen, jobs = scenario.server, scenario.prometheus, scenario.fleet.jobs
    name = "fl_certificate_expiry_timestamp_seconds"
    expected = [(name, jobs["fl-server"][0], server.settings["tls"]["cert"], server.settings["tls"]["client_ca"])]
    for daemon, instance in zip(scenario.fleet.daemons.values(), jobs["fl-client"], strict=True):
        tls = daemon.settings["tls"]
        expected.append(("fl_client_certificate_expiry_timestamp_seconds", instance, tls["cert"], tls["ca"]))
    for name, instance, *files in expected:
        for kind, file in zip(("cert", "ca"), files, strict=True):
            query = f'last_over_time({name}{{instance="{instance}", file="{kind}"}}[5s])'
            assert seen.value(query) == ends(file)


def test_metrics_are_restored_after_a_restart(scenario: MonitoredRuns) -> None:
    """Round, commit, evaluation and state of runs that were over when the coordinator was killed."""
    for run in RUNS[:3]:
        status, value = scenario.server.run(run), _values(scenario, run, time.time())
        assert value("fl_round") == status.rounds_done
        state = admin_pb2.RunState.Name(status.state).removeprefix("RUN_STATE_").lower()
        assert value("fl_run_state", state=state) == 1
        assert value("fl_run_state_since_timestamp_seconds") == pytest.approx(_unix(status.ended), abs=1e-3)


def _values(scenario: MonitoredRuns, run: str, at: float) -> Callable[..., float]:
    """Values of a run's metrics at a time, by name and labels; each must be there.

    It is the last scraped value, because a scrape may be late on a busy machine.
    """

    def value(name: str, **labels: str) -> float:
        selector = ", ".join(f'{key}="{wanted}"' for key, wanted in {"run": run, **labels}.items())
        found = scenario.prometheus.value(f"last_over_time({name}{{{selector}}}[5s])", at)
        assert found is not None, f"{name}{{{selector}}}"
        return float(found)

    return value


def _unix(moment: Any) -> float:
    return float(moment.seconds + moment.nanos / 1e9)


@pytest.mark.parametrize("panel", [*panels(), *annotation_queries()], ids=str)
def test_a_panel_answers_and_has_data(scenario: MonitoredRuns, panel: Panel) -> None:
    """Each query over the whole time, for one run or all, has no error and at least one number."""
    found = []
    for run in (*RUNS, ".+"):
        for query in panel.queries:
            drawn = scenario.prometheus.query_range(filled(query, run), scenario.began, time.time(), step_s=0.5)
            found += [value for series in drawn for _, value in series.points if not math.isnan(value)]
    if panel.title in EMPTY_PANELS:
        assert not found, f"{panel} has data: remove it from EMPTY_PANELS"
    else:
        assert found, f"{panel} is empty"
