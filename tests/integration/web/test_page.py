"""The web page of a coordinator with daemons, over loopback, without a browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator

import pytest

from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator, Fleet
from tests.processes.process import Workspace, eventually
from tests.processes.web_page import WebPage

pytest.importorskip("starlette", reason="the extra `web` is not installed")


@pytest.fixture(scope="session")
def shared_page(shared_fleet: Fleet) -> Iterator[WebPage]:
    """One web page for all tests of a worker."""
    with WebPage(str(shared_fleet.server.settings["admin_listen"]), shared_fleet.workspace.folder) as page:
        yield page


@pytest.fixture
def page(fleet: Fleet, shared_page: WebPage) -> WebPage:
    """The web page of `fleet`."""
    return shared_page


def test_every_view_is_a_whole_page(fleet: Fleet, page: WebPage) -> None:
    """With its tables in the HTML, and nothing that a strict content policy forbids."""
    run = fleet.server.create("web-views", evaluation={"clients_every": 2})
    fleet.server.completed(run)
    shown = {
        "/": [run, "completed", "Which client is bad?"],
        "/runs?q=web-views": [run, "1 run, "],
        f"/runs/{run}": ["Accuracy as a table", "Configuration", "alpha", "round 2", "Latest model"],
        f"/compare?run={run}&x=bytes": ["Curves as tables", run],
        "/clients": ["edge-0", "edge-2"],
        "/clients/edge-1": ["edge-1", "Latest events", "tiny_task:Tiny"],
        f"/events?subject={run}&kind=committed": ["round committed", "round 2"],
    }
    for path, texts in shown.items():
        answer = page.get(path)
        assert answer.status == 200, f"{path}: {answer.text}"
        assert [text for text in texts if text not in answer.text] == [], path
        assert not re.search(r"<style|<script(?![^>]* src=)|\son\w+=|\sstyle=|https?://", answer.text), path
    # Other tests of the worker may have left failed runs and clients behind.
    first = page.get("/").text
    assert (">healthy</span>" in first) == ('<ul class="problems' not in first)
    counts = [int(count) for count in re.findall(r"(\d+) clients", page.get("/clients").text)]
    assert max(counts, default=0) >= 3


def test_the_curves_are_those_of_the_rounds(fleet: Fleet, page: WebPage) -> None:
    """Accuracy by round as the Admin service has it; the CSV file has every round."""
    run = fleet.server.create("web-curves")
    fleet.server.completed(run)
    expected = [summary.metrics["accuracy"] for summary in fleet.server.rounds(run)]
    charts = {chart["key"]: chart for chart in json.loads(page.get(f"/runs/{run}/curves.json").text)["charts"]}
    assert charts["accuracy"]["series"][0]["values"] == expected
    assert [x["rounds"] for x in charts["accuracy"]["x"]] == [1, 2, 3]
    header, *lines = page.get(f"/runs/{run}/rounds.csv").text.splitlines()
    column = header.split(",").index("accuracy")
    assert [float(line.split(",")[column]) for line in lines] == expected


def test_the_model_can_be_downloaded(fleet: Fleet, page: WebPage) -> None:
    """As a safetensors file with its digest, and so can the averaged one by its link; the history records both."""
    run = fleet.server.create("web-model", averaging={"method": "ema", "decay": 0.5})
    fleet.server.completed(run)
    [link] = re.findall(r'href="([^"]*model=averaged[^"]*)"', page.get(f"/runs/{run}").text)
    averaged = page.get(html.unescape(link))
    assert averaged.headers["Content-Disposition"] == f'attachment; filename="{run}-round-2-averaged.safetensors"'
    assert '"holds":"averaged"' in averaged.text
    answer = page.get(f"/runs/{run}/model?round=latest")
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{run}-round-2.safetensors"'
    assert len(answer.headers["X-Content-BLAKE3"]) == 64
    assert '"dtype":"F32"' in answer.text
    assert fleet.server.history(run).count("model_exported") == 2


def test_the_cohort_has_a_phase_for_each_client(fleet: Fleet, page: WebPage) -> None:
    """One has delivered, the other trains. It is shown so after a restart, too, although it fetches nothing again."""
    quick, slow = fleet.half_delivered("web-cohort")
    row = r'<tr id="member:(edge-\d)">.*?<td><span class="state \w+">([\w ]+)</span>'

    def phases() -> dict[str, str]:
        return dict(re.findall(row, page.get("/runs/web-cohort").text, re.DOTALL))

    expected = {quick.client_id: "delivered", slow.client_id: "training"}
    eventually(lambda: phases() == expected, "one has delivered, the other has fetched the model and trains")
    fleet.server.kill()
    fleet.server.serve()
    eventually(lambda: phases() == expected, "one has delivered, the other holds the model and trains")
    fleet.release()
    fleet.server.completed("web-cohort")


def test_a_stream_has_what_changes(fleet: Fleet, page: WebPage) -> None:
    """Parts of the page, points of the curves, and the end of the run."""
    fleet.hold()
    run = fleet.server.create("web-live")
    with page.stream(f"/live?view=run&id={run}&after=0") as stream:
        eventually(lambda: "collecting" in json.dumps(stream.named("parts")), "the first round is shown")
        fleet.release()
        fleet.server.completed(run)
        eventually(lambda: "completed" in json.dumps(stream.named("parts")[-1]), "its end is shown")
    points = [x["rounds"] for each in stream.named("curves") if "charts" in each for x in each["charts"][0]["x"]]
    reloads = [each for each in stream.named("curves") if each.get("reload")]
    assert reloads
    assert set(points) <= {1, 2, 3}


def test_a_cut_stream_goes_on_where_it_was(fleet: Fleet, page: WebPage) -> None:
    """Two streams one after the other have together each entry of the history once, like one that was never cut."""
    with fleet.server.admin() as admin:
        start = admin.history.list_history("", 1)[-1].number
    path = f"/live?view=events&all=1&after={start}"
    with page.stream(path) as whole:
        with page.stream(path) as first:
            fleet.server.completed(fleet.server.create("web-cut-1"))
            eventually(lambda: len(first.entries()) >= 3, "entries come")
        seen = first.entries()
        position = next(number for name, number, _ in reversed(first.events) if name == "entries")
        fleet.server.completed(fleet.server.create("web-cut-2"))
        with fleet.server.admin() as admin:
            expected = [entry.number for entry in admin.history.list_history("", 0) if entry.number > start]
        with page.stream(path, **{"Last-Event-ID": position}) as second:
            eventually(lambda: seen + second.entries() == expected, "the second has the rest, and nothing twice")
        eventually(lambda: whole.entries() == expected, "the stream that was never cut has the same")


def test_an_unknown_address_is_not_found(page: WebPage) -> None:
    """Pages, runs, clients and views."""
    for path in ("/nothing", "/runs/nothing", "/clients/nothing", "/live?view=nothing", "/static/nothing.js"):
        assert page.get(path).status == 404, path
    assert page.get("/static/..%2f..%2fapp.py").status == 404


def test_a_wrong_value_is_explained(page: WebPage) -> None:
    """The page states what was expected and what came."""
    answer = page.get("/events?before=yesterday")
    assert answer.status == 400
    assert "expected a whole number of at least 0, got &#39;yesterday&#39;" in answer.text


def test_a_label_with_markup_stays_text(fleet: Fleet, page: WebPage) -> None:
    """A note with HTML is shown as it was written."""
    with fleet.server.admin() as admin:
        admin.call(
            admin_pb2.DrainClientRequest(client_id="edge-0", reason="<b>broken</b> <script>alert(1)</script>"),
            admin_pb2.DrainClientResponse,
        )
    text = page.until("/clients", "&lt;b&gt;broken")
    assert "<script>alert" not in text


@pytest.mark.slow
def test_lists_come_in_pages(fleet: Fleet, page: WebPage) -> None:
    """A page of events has a link to the older ones, and each entry is on one page."""
    fleet.server.completed(fleet.server.create("web-pages", stop={"rounds": 60}))
    seen: list[str] = []
    path: str | None = "/events?all=1"
    for _ in range(40):
        text = page.get(path or "").text
        seen += re.findall(r'data-number="(\d+)"', text)
        following = re.search(r'href="(/events\?[^"]*before=\d+)"[^>]*rel="next"', text)
        path = following.group(1).replace("&amp;", "&") if following else None
        if path is None:
            break
    with fleet.server.admin() as admin:
        expected = [str(entry.number) for entry in admin.history.list_history("", 0)]
    assert seen == list(reversed(expected))


@pytest.mark.slow
def test_a_coordinator_that_is_away_is_reported_and_awaited(workspace: Workspace) -> None:
    """A new page has status 503; an open stream reports the loss, then the return, and loses no entry."""
    server = Coordinator(workspace).serve()
    with WebPage(str(server.settings["admin_listen"]), workspace.folder) as page:
        before = server.create("before-the-kill")
        with page.stream("/live?view=events&all=1&after=0") as stream:
            eventually(stream.entries, "the first entry comes")
            server.kill()
            eventually(lambda: any(not link["up"] for link in stream.named("link")), "the loss is reported")
            answer = page.get("/")
            assert (answer.status, answer.headers["Retry-After"]) == (503, "3")
            assert "The coordinator does not answer" in answer.text
            server.serve()
            eventually(lambda: stream.named("link")[-1]["up"], "the return is reported")
            server.create("after-the-kill")
            with server.admin() as admin:
                expected = [entry.number for entry in admin.history.list_history("", 0)]
            eventually(lambda: stream.entries() == expected, "every entry came once")
        assert before in page.until("/", "after-the-kill")
    assert server.exit_code is None
