"""One run and one client on every surface: terminal, page, notebook, trackers and files tell the same."""

from __future__ import annotations

import asyncio
import csv
import html
import io
import re
from typing import Any, cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, RenderableType

from fl_common.units import BY_CLIENTS, LOSS, OF_AVERAGED
from fl_ops.notebook import _flat
from fl_ops.render.rounds import evaluations_table, rounds_table
from fl_ops.render.tables import client_details, clients_table, run_summary, runs_table
from fl_ops.render.top import Federation, TopView
from fl_ops.render.watching import LiveTable, RunProgress
from fl_ops.trackers.ledger import round_facts
from fl_server.rounds import metrics as server_metrics
from fl_web.facts import client as client_facts
from fl_web.facts import run as run_facts
from fl_web.facts.federation import health, problems
from fl_web.facts.rounds import EVALUATED, column, rounds_of
from fl_web.facts.words import CLIENT_MARKS, CLIENT_STATES, PHASES, RUN_STATES, known, run_number
from fl_web.rendering import rendered
from fl_web.views.data import rounds_csv
from fl_web.views.view import Params
from protos.fl.v1 import admin_pb2 as pb

METRICS = {
    "accuracy": 0.9641, "loss": 0.125, "averaged_accuracy": 0.97, "clients_evaluated": 2.0,
    "clients_accuracy_mean": 0.6, "clients_accuracy_std": 0.2, "clients_accuracy_worst_decile": 0.4,
    "clients_accuracy": 0.7,
}  # fmt: skip
CREATED = Timestamp(seconds=1_790_000_000)


def summary(number: int) -> pb.RoundSummary:
    """A committed round with every kind of value, a minute after the one before."""
    found = pb.RoundSummary(
        round=number, seconds=58.0, attempts=2, accepted=3, dropped=1, training_loss=0.5, metrics=METRICS,
        bytes_down=3 << 20, bytes_up=1536, model_digest="blake3:aa", averaged_digest="blake3:bb",
    )  # fmt: skip
    found.committed.seconds = CREATED.seconds + 60 * (number + 1)
    found.local_epochs.add(values={"loss": 0.7})
    found.account.norms.update({"update": 0.31, "update_smallest": 0.2, "update_largest": 0.55, "aggregate": 0.21})
    found.account.norms["direction"], found.account.cosine = 0.9, 0.73
    found.account.assignments.update({"admitted": 3, "lost": 1})
    found.account.seconds.update({"collecting": 50.0, "stepping": 8.0})
    return found


SUMMARIES = [summary(number) for number in range(3)]
ROUNDS = rounds_of(SUMMARIES)


def status() -> pb.RunStatus:
    """A run of ten rounds that collects, with everything that an operator may have to do."""
    run = pb.RunStatus(
        run_id="wards", state=pb.RUN_STATE_RUNNING, reason="a reason", rounds_done=3, phase="collecting", attempt=1,
        cohort=["a", "b"], cohort_size=2, admitted=1, created=CREATED, latest=SUMMARIES[-1], best=SUMMARIES[1],
        bytes_down=9 << 20, bytes_up=4608, eligible_clients=1, newest_metrics=METRICS, awaited=["b"],
        awaited_count=1, deadline_left_s=252.0, policy_refusals={"tasks": 2}, best_metrics={"accuracy": 0.9641},
        account=SUMMARIES[-1].account,
    )  # fmt: skip
    run.spec.stop.rounds, run.spec.stop.metric = 10, "accuracy"
    run.latest_failure.client_id, run.latest_failure.message, run.latest_failure.clients = "c", "KeyError: 'age'", 1
    run.below_due = 1
    run.first_below_due.add(client_id="d", counted=1, due=4.0)
    run.states.members, run.states.missing, run.states.left_out = 5, 1, 1
    run.states.first_missing.append("e")
    run.states.first_left_out.append("f")
    run.account.refused["not_finite"], run.account.short, run.account.why_short = 2, 1, "c failed"
    run.account.staleness[1] = 4
    return run


def overview() -> pb.RunOverview:
    """The same run in a list."""
    run = status()
    return pb.RunOverview(
        run_id=run.run_id, state=run.state, rounds_done=3, rounds_planned=10, phase=run.phase, cohort_size=2,
        admitted=1, created=CREATED, latest_commit=run.latest.committed, metric="accuracy", best=0.9641,
        newest_metrics=METRICS, task="digits", algorithm="fedcm", below_due=1,
    )  # fmt: skip


def drawn(*renderings: RenderableType) -> str:
    """What a very wide terminal shows."""
    console = Console(width=4000, height=200, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        for rendering in renderings:
            console.print(rendering)
    return capture.get()


def page(template: str, **context: Any) -> str:
    """The text of a part of the page, without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", rendered(template, context)))


def run_page(run: pb.RunStatus) -> str:
    """The parts of a run's page that tell of it."""
    facts = [*run_facts.figures(run), *run_facts.models(run)]
    return (
        page("run/_head.html", run=run, may_export=True, rounds=ROUNDS)
        + page("run/_clients.html", bad=[], attention=known(run_facts.attention(run)), worst=[])
        + page("run/_figures.html", run=run, figures=facts)
        + page("run/_now.html", run=run, cohort=None)
    )


def test_every_fact_of_a_run_is_on_terminal_and_page() -> None:
    """In the same words: what needs attention with its remedy, and the figures."""
    facts = known([*run_facts.attention(status()), *run_facts.figures(status())])
    assert len(facts) == 14
    terminal, shown = drawn(run_summary(status())), run_page(status())
    for name, parts in facts:
        for text in map(str, parts):
            assert f"{name} " in terminal
            assert text in terminal, text
            assert name[:1].upper() + name[1:] in shown
            assert text.replace("`", "") in shown, text


def test_the_time_left_is_the_same_wherever_rounds_are_known() -> None:
    """`fl run watch` and the page of the run; `fl top` and the page's lists, which know no rounds, agree too."""
    progress = RunProgress(run=status())
    for one in SUMMARIES:
        progress.add_round(one)
    assert "about 7 min left" in drawn(LiveTable(progress))
    assert "about 7 min" in run_page(status())
    assert "7 min" in drawn(TopView(Federation("s", pb.GetOverviewResponse(runs=[overview()])), whole=True))
    assert "7 min" in page(
        "federation/_runs.html", active=[overview()], cards=[overview()], most_cards=1, more_active=0, ended=[]
    )


def test_the_round_under_way_is_the_same_in_every_list() -> None:
    """How many of the drawn clients have delivered."""
    texts = [
        drawn(runs_table([status()])),
        drawn(TopView(Federation("s", pb.GetOverviewResponse(runs=[overview()])), whole=True)),
        page("federation/_waits.html", active=[overview()], most_waits=1),
    ]
    assert ["collecting 1/2" in text for text in texts] == [True] * 3
    assert " 1/2 " in drawn(rounds_table(ROUNDS, under_way=status()))
    assert "1/2" in run_page(status())


@pytest.mark.parametrize("state", [*RUN_STATES, "not loaded"])
def test_a_state_of_a_run_has_one_word(state: str) -> None:
    """In `fl run list`, `fl run show`, `fl top`, and on the page."""
    run, short = status(), overview()
    run.state = short.state = cast(pb.RunState, run_number(state) or 0)
    top = TopView(Federation("s", pb.GetOverviewResponse(runs=[short])), whole=True)
    shown = [drawn(runs_table([run])), drawn(run_summary(run)), drawn(top), run_page(run)]
    shown.append(page("runs/_list.html", overview=pb.GetOverviewResponse(runs=[short]), found=1, params=Params({})))
    assert [state in text for text in shown] == [True] * 5


def test_problems_of_a_federation_are_in_top_and_on_the_page() -> None:
    """A failed run, a client that fails, further ones, a lost connection: one line each, the worst first."""
    failed = pb.RunOverview(run_id="worse", state=pb.RUN_STATE_FAILED, reason="diverged", ended=CREATED)
    reply = pb.GetOverviewResponse(runs=[overview(), failed], now=CREATED)
    reply.clients_by_state.update({"present": 2, "attention": 2, "suspect": 1})
    need = pb.Attention(reason="failing", why="failed 3 of its newest 5 assignments", remedy="`fl clients show c`")
    reply.attention.add(client_id="c", attention=need)
    lines = [problem.text for problem in problems(reply)]
    assert lines == [
        "worse failed: diverged",
        "c failed 3 of its newest 5 assignments; `fl clients show c`",
        "1 more client needs attention",
        "1 client lost its connection a moment ago",
    ]
    top = drawn(TopView(Federation("s", reply), whole=True))
    own = [(one.tone, one.text, "") for one in problems(reply) if not one.client]
    words: dict[str, Any] = {"run_states": RUN_STATES, "client_states": CLIENT_STATES, "client_marks": CLIENT_MARKS}
    shown = page("federation/_health.html", overview=reply, problems=own, health=health(problems(reply)), **words)
    assert [line in top for line in lines] == [True] * 4
    assert ("in trouble, version" in top, "in trouble" in shown) == (True, True)
    assert all(text in shown for _, text, _ in own)
    assert f"c {need.why}" in " ".join(page("federation/_attention.html", overview=reply, slowest=[]).split())


def details() -> pb.GetClientResponse:
    """A client with everything that keeps it from work."""
    client = pb.ClientStatus(client_id="edge-3", state=pb.CLIENT_STATE_PRESENT, banned=True, draining=True, note="n")
    client.quarantine.until.CopyFrom(CREATED)
    client.quarantine.reason = "3 updates refused in a row"
    client.availability.detail = "on battery"
    client.tasks.add(name="digits", train_examples=180, train_batches=6, eval_examples=20)
    client.labels["site"], client.policy_refusals["wards"] = "north", "tasks: no"
    client.device.kind, client.device.name, client.device.memory_bytes = "cuda", "Orin", 8 << 30
    found = pb.GetClientResponse(client=client, work="run wards, round 3", conflicts=2, contested=True)
    for origin in (found.session, found.refused, found.fenced):
        origin.address, origin.instance_id = "192.0.2.7:5000", "cafe"
        origin.certificate_serial = "ab12"
    found.standing.reason = "2 updates refused in a row"
    found.not_drawn.add(run_id="wards", why="is banned", remedy="unban it")
    return found


def test_every_fact_of_a_client_is_on_terminal_and_page() -> None:
    """In the same words; only times have the form of the surface."""
    facts = known(client_facts.facts(details()))
    assert len(facts) >= 14
    terminal = drawn(client_details(details()))
    shown = page("client/_facts.html", facts=facts, client=details().client)
    for name, parts in facts:
        assert name in terminal
        assert name[:1].upper() + name[1:] in shown
        for text in (part for part in parts if isinstance(part, str)):
            assert text in terminal, text
            assert text in shown, text


def test_the_state_of_a_client_has_the_same_words_everywhere() -> None:
    """Its presence, then each mark; and the same remark beside it."""
    client = details().client
    words = ["present", "banned", "quarantined", "draining", "may not train"]
    listed = page(
        "clients/_list.html", clients=[client], found=1, next_page="", order="id", params=Params({}), all_marks=(),
        client_states=CLIENT_STATES,
    )  # fmt: skip
    top = drawn(TopView(Federation("s", pb.GetOverviewResponse(), [client]), whole=True))
    assert client_facts.words(client) == words
    for text in (drawn(clients_table([client])), top, listed):
        assert [word for word in words if word not in text] == []
        assert "3 updates refused in a row" in text


def test_the_values_of_a_round_have_the_same_names_everywhere() -> None:
    """In the notebook, in the files for trackers, and in the page's CSV file."""

    class Reader:
        async def rounds(self, _: str) -> Any:
            return ROUNDS

    answer = asyncio.run(rounds_csv(cast(Any, Reader()), Params({"id": ["wards"]})))
    (row, *_) = csv.DictReader(io.StringIO(bytes(answer.body).decode()))
    flat, tracked = _flat(SUMMARIES[0]), round_facts(SUMMARIES[0]).values
    assert flat["accuracy"] == tracked["evaluation/accuracy"] == float(row["accuracy"]) == 0.9641
    of_columns = {column(name): value for name, value in tracked.items()}
    assert {name: flat[name] for name in of_columns} == of_columns
    epochs = {"training_last_epoch_loss"}
    assert {name: float(row[name]) for name in of_columns.keys() - epochs} == {
        name: value for name, value in of_columns.items() if name not in epochs
    }
    assert row.keys() - of_columns.keys() == {"round", "committed", "model_digest", "averaged_digest"}


def test_an_evaluation_on_clients_is_the_same_on_terminal_and_page() -> None:
    """The worst client first, accuracy before other metrics, and one summary."""
    response = pb.ListEvaluationsResponse(round=SUMMARIES[0])
    for name, accuracy in (("good", 0.8), ("bad", 0.4)):
        response.evaluations.add(client_id=name, num_examples=10, metrics={"accuracy": accuracy, "aaa": 1.0})
    shown = page("run/_evaluations.html", evaluations=response, run=status())
    for text in (drawn(evaluations_table(response)), shown):
        assert text.index("bad") < text.index("good")
        assert text.index("accuracy") < text.index("aaa")
        assert "accuracy 60.00 ± 20.00 %, worst tenth 40.00 %, over all examples 70.00 %" in text
        assert "80.00 %" in text


def test_phases_of_clients_are_counted_in_one_order() -> None:
    """An unknown phase comes last."""
    numbers = dict.fromkeys((*PHASES, "resting"), 1)
    assert list(run_facts.by_phase(pb.ListCohortResponse(by_phase=numbers))) == [*PHASES, "resting"]


def test_names_of_metrics_are_those_of_the_coordinator() -> None:
    """The page may not import the coordinator, so the beginnings of the names are written twice."""
    assert (BY_CLIENTS, OF_AVERAGED, EVALUATED, LOSS) == (
        server_metrics.PREFIX,
        server_metrics.AVERAGED,
        server_metrics.EVALUATED,
        server_metrics.LOSS,
    )
