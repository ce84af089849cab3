"""What a real Prometheus saw of a real federation: every query answers, with the values of the runs' own records."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
from cryptography import x509

from protos.fl.v1 import admin_pb2
from tests.monitoring.alert_files import rules
from tests.monitoring.federation import RUNS, SIZE, watched
from tests.monitoring.panels import annotations, filled, panels
from tests.monitoring.programs import needed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

METRIC = re.compile(r"\b(?:fl|process)_\w+\b(?!:)")
"""A metric's name; not one within the name of a recorded rule."""
EMPTY_PANELS = {
    "Work that failed on devices": "the devices do all that they are asked for; what fails here is killed",
}
"""Panels without data here, and why."""


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """All faults have happened, once for every test of this module."""
    needed("prometheus")
    with watched(tmp_path_factory.mktemp("watched")) as story:
        story.play()
        yield story


def test_every_rule_is_evaluated_without_an_error(story):
    """Prometheus says so of each of them, and each expression answers when it is asked for by itself."""
    told = story.seen.rules()
    assert len(told) == len(list(rules()))
    assert [rule["name"] for rule in told if rule["health"] != "ok" or rule.get("lastError")] == []
    for rule in rules():
        story.seen.query(rule["expr"])


def test_every_metric_of_a_rule_has_data(story):
    """What a rule selects or records was there, so that none is silent because of a wrong name."""
    named = {name for rule in rules() for name in METRIC.findall(rule["expr"])}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    silent = {name for name in named | recorded if not story.seen.query(f'last_over_time({{__name__="{name}"}}[10m])')}
    assert silent == set()


def test_what_ought_to_fire_did_and_nothing_else(story):
    """The run that failed is told at once; all other alerts have been looked at, and had no reason."""
    assert story.seen.value('ALERTS{alertname="FlRunFailed", alertstate="firing", run="diverged"}') == 1
    assert story.seen.query('last_over_time(ALERTS{alertname!="FlRunFailed", alertstate="firing"}[10m])') == []


def test_the_undisturbed_run_is_told_as_it_was(story):
    """Every number that a run's record has, of a run in which nothing happened."""
    run, rounds = story.server.run("undisturbed"), story.server.rounds("undisturbed")
    value = _values(story, "undisturbed", story.undisturbed_at)
    assert value("fl_round") == value("fl_rounds_total", outcome="committed") == run.rounds_done == 4
    assert value("fl_rounds_total", outcome="abandoned") == 0
    assert value("fl_attempts_total") == sum(each.attempts for each in rounds)
    assert value("fl_assignments_total", state="admitted") == sum(each.accepted for each in rounds) == 4 * SIZE
    others = ("refused", "failed", "lost", "cancelled")
    assert {value("fl_assignments_total", state=state) for state in others} == {0}
    assert value("fl_round_seconds_count") == 4
    assert value("fl_round_seconds_sum") == pytest.approx(sum(each.seconds for each in rounds))
    assert value("fl_last_commit_timestamp_seconds") == pytest.approx(_unix(rounds[-1].committed), abs=1e-3)
    assert value("fl_training_loss") == pytest.approx(rounds[-1].training_loss)
    assert value("fl_run_state", state="completed") == 1
    assert value("fl_run_state_since_timestamp_seconds") == pytest.approx(_unix(run.ended), abs=1e-3)


def test_evaluations_are_told_as_they_were(story):
    """The server's and the clients' metrics of the last round, and the best of all rounds."""
    run, rounds = story.server.run("undisturbed"), story.server.rounds("undisturbed")
    value = _values(story, "undisturbed", story.undisturbed_at)
    metrics = dict(rounds[-1].metrics)
    assert {"accuracy", "loss", "clients_accuracy_mean", "clients_evaluated"} <= metrics.keys()
    assert {name: value("fl_evaluation", metric=name) for name in metrics} == metrics
    assert value("fl_evaluation_best", metric="accuracy") == run.best.metrics["accuracy"]
    assert value("fl_evaluation_best", metric="loss") == min(each.metrics["loss"] for each in rounds)
    spread = {"mean": "mean", "deviation": "std", "worst_decile": "worst_decile"}
    for statistic, suffix in spread.items():
        told = value("fl_client_evaluation", metric="accuracy", statistic=statistic)
        assert told == metrics[f"clients_accuracy_{suffix}"]
    assert value("fl_evaluations_not_finite_total") == 0


def test_bytes_are_the_same_for_the_run_the_coordinator_and_the_daemons(story):
    """While there was one run only: its record, both ends' counters, and the daemons' work.

    The last model of 43 float32 is fetched for its evaluation alone, after its round's record was closed.
    """
    run, seen = story.server.run("undisturbed"), story.seen
    assert run.bytes_up == 4 * SIZE * 43 * 4
    for direction, counted in (("up", run.bytes_up), ("down", run.bytes_down + SIZE * 43 * 4)):
        of_server = f'sum(last_over_time(fl_transfer_bytes_total{{direction="{direction}"}}[5s]))'
        of_daemons = f'sum(last_over_time(fl_client_transfer_bytes_total{{direction="{direction}"}}[5s]))'
        assert [seen.value(each, story.undisturbed_at) for each in (of_server, of_daemons)] == [counted] * 2
    trained = seen.value("sum(last_over_time(fl_client_rounds_trained_total[5s]))", story.undisturbed_at)
    assert trained == 4 * SIZE


def test_refusals_are_told_by_their_reasons(story):
    """One wrong shape and one NaN, as the clients' records have them; the run of the second has failed."""
    value = _values(story, "bent", story.killed_at)
    assert value("fl_updates_refused_total", reason="layout") == value("fl_assignments_total", state="refused") == 1
    assert value("fl_assignments_total", state="admitted") == story.server.rounds("bent")[0].accepted == 1
    value = _values(story, "diverged", story.killed_at)
    assert value("fl_updates_refused_total", reason="not_finite") == 1
    assert value("fl_run_state", state="failed") == 1
    assert story.server.run("diverged").state == admin_pb2.RUN_STATE_FAILED
    assert [story.server.client(f"raw-{number}").updates_refused for number in range(3)] == [1, 0, 1]
    assert story.seen.value("sum(last_over_time(fl_updates_refused_total[5s]))", story.killed_at) == 2


def test_a_killed_daemon_and_a_killed_coordinator_are_told(story):
    """What was counted before the coordinator's death and after it is what the rounds' records say together."""
    rounds = story.server.rounds("faulted")
    before, after = (_values(story, "faulted", at) for at in (story.killed_at, time.time()))

    def both(name, **labels):
        return before(name, **labels) + after(name, **labels)

    assert both("fl_rounds_total", outcome="committed") == after("fl_round") == len(rounds) == 4
    assert both("fl_assignments_total", state="lost") == sum(each.dropped for each in rounds) == 1
    assert both("fl_assignments_total", state="admitted") == sum(each.accepted for each in rounds) == 4 * SIZE - 1
    assert both("fl_attempts_total") == sum(each.attempts for each in rounds) == 4
    assert after("fl_last_commit_timestamp_seconds") == pytest.approx(_unix(rounds[-1].committed), abs=1e-3)
    assert after("fl_evaluation", metric="accuracy") == rounds[-1].metrics["accuracy"]
    assert story.seen.value("changes(namespace:fl_coordinator_start_time_seconds:max[10m])") == 1
    assert story.seen.value('min_over_time(up{job="fl-server"}[10m])') == 0


def test_certificates_are_told_with_their_ends(story):
    """The coordinator's own and that of each daemon, as the files have them; and the authority of all."""

    def ends(file):
        return x509.load_pem_x509_certificate(Path(file).read_bytes()).not_valid_after_utc.timestamp()

    pki, seen, jobs = story.fleet.pki, story.seen, story.fleet.jobs
    stems = ["server-coordinator", *(f"client-edge-{index}" for index in range(SIZE))]
    names = ["fl_certificate_expiry_timestamp_seconds", *["fl_client_certificate_expiry_timestamp_seconds"] * SIZE]
    for stem, name, instance in zip(stems, names, [*jobs["fl-server"], *jobs["fl-client"]], strict=True):
        for file in ("cert", "ca"):
            told = seen.value(f'last_over_time({name}{{instance="{instance}", file="{file}"}}[5s])')
            assert told == ends(pki.files(stem)[file])


def test_what_was_before_the_restart_is_read_back(story):
    """Round, commit, evaluation and state of runs that were over when the coordinator was killed."""
    for run in RUNS[:3]:
        status, value = story.server.run(run), _values(story, run, time.time())
        assert value("fl_round") == status.rounds_done
        state = admin_pb2.RunState.Name(status.state).removeprefix("RUN_STATE_").lower()
        assert value("fl_run_state", state=state) == 1
        assert value("fl_run_state_since_timestamp_seconds") == pytest.approx(_unix(status.ended), abs=1e-3)


def _values(story, run, at):
    """Values of a run's metrics at a time, by name and labels; each must be there.

    The last that was scraped: on a busy machine a scrape may come too late, and none has a value then.
    """

    def value(name, **labels):
        selector = ", ".join(f'{key}="{each}"' for key, each in {"run": run, **labels}.items())
        found = story.seen.value(f"last_over_time({name}{{{selector}}}[5s])", at)
        assert found is not None, f"{name}{{{selector}}}"
        return found

    return value


def _unix(moment):
    return moment.seconds + moment.nanos / 1e9


@pytest.mark.parametrize("panel", [*panels(), *annotations()], ids=str)
def test_a_panel_answers_and_has_data(story, panel):
    """Each of its queries, drawn over the whole story for one run or all: no error, and at least one number."""
    found = []
    for run in (*RUNS, ".+"):
        for query in panel.queries:
            drawn = story.seen.query_range(filled(query, run), story.began, time.time(), step_s=0.5)
            found += [value for series in drawn for _, value in series.points if not math.isnan(value)]
    if panel.title in EMPTY_PANELS:
        assert not found, f"{panel} has data: it is not to be listed as empty"
    else:
        assert found, f"{panel} is empty"
