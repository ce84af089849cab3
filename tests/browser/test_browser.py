"""The web page in a real browser: live, after a killed coordinator, without JavaScript, and accessible."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl_common.signatures import make_key
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, run_fl
from tests.processes.web_page import WebPage

pytest.importorskip("starlette", reason="the extra `web` is not installed")

TINY: dict[str, Any] = {"round": {"clients_per_round": 2, "min_clients": 2}}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
"""Of axe-core, by their tags."""
LONG_NAME = """(() => {
    const row = document.querySelector("table.rows tr");
    row.firstElementChild.textContent = "Task " + "package.module.".repeat(6) + "Task";
    return row.lastElementChild.clientWidth;
})()"""
"""Gives a fact a name without spaces, as tasks have, and returns the width of its value."""
INKED = """(figure => {
    const canvas = figure.querySelector("canvas");
    const series = getComputedStyle(figure.querySelector(".legend i")).backgroundColor;
    const [red, green, blue] = series.match(/\\d+/g).map(Number);
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const columns = new Set();
    for (let at = 0; at < pixels.length; at += 4)
        if (Math.abs(pixels[at] - red) + Math.abs(pixels[at + 1] - green) + Math.abs(pixels[at + 2] - blue) < 60
            && pixels[at + 3] > 100) columns.add((at / 4) % canvas.width);
    const all = [...columns].sort((left, right) => left - right);
    return all.slice(1).map((column, index) => column - all[index]).filter(step => step > 20).length;
})"""
"""Of a figure with one curve: how many columns without its colour lie between columns with it, in wide stretches."""
Federation = tuple[Coordinator, list[Daemon]]


@pytest.mark.slow
def test_a_run_that_goes_on_is_shown_live(federation: Federation, page: WebPage, tab: Any) -> None:
    """State, progress and curves change without a reload, and a table that a person opened stays open."""
    server, daemons = federation
    for daemon in daemons:
        daemon.hold.touch()
    run = server.create("browser-live", **TINY)
    tab.goto(f"{page.address}/runs/{run}")
    tab.locator("#link[data-state=live]").wait_for()
    tab.get_by_text("collecting", exact=True).first.wait_for()
    tab.evaluate("window.kept = true")
    for daemon in daemons:
        daemon.hold.unlink()
    tab.locator("#head .state", has_text="completed").wait_for()
    tab.locator("#charts canvas").first.wait_for()
    summary = tab.locator("figure[id='chart:accuracy'] summary")
    summary.click()
    assert tab.locator("figure[id='chart:accuracy'] tbody tr").count() == 3
    assert tab.evaluate("window.kept"), "the page was not loaded again"
    newest = server.rounds(run)[-1].metrics["accuracy"]
    assert f"{100 * newest:.2f} %" in tab.locator("figure[id='chart:accuracy'] .legend").inner_text()
    tab.get_by_text("bytes", exact=True).first.click()
    tab.locator("figure[id='chart:accuracy'] canvas").wait_for()


@pytest.mark.slow
def test_a_lost_evaluation_is_a_gap(federation: Federation, page: WebPage, tab: Any) -> None:
    """No straight line is drawn through rounds without a value; on each axis."""
    server, _ = federation
    server.create("browser-gap", **TINY)
    server.completed("browser-gap")
    points = [{"rounds": number, "bytes": 1e6 * number, "time": 2.0 * number} for number in (1, 2, 3, 7, 8, 9)]
    held_out = {"key": "accuracy", "title": "held-out", "values": [0.5] * len(points)}
    for breaks in ([], [3]):
        chart = {"key": "accuracy", "unit": "share", "x": points, "series": [{**held_out, "breaks": breaks}]}
        answer = json.dumps({"charts": [chart], "marks": []})
        tab.route("**/curves.json", partial(_answered, answer))
        tab.goto(f"{page.address}/runs/browser-gap")
        figure = tab.locator("figure[id='chart:accuracy']")
        for axis in ("rounds", "bytes", "time"):
            tab.get_by_text(axis, exact=True).first.click()
            figure.locator("canvas").wait_for()
            assert figure.evaluate(INKED) == len(breaks), axis
        tab.unroute("**/curves.json")


def _answered(text: str, route: Any) -> None:
    route.fulfill(body=text, content_type="application/json")


@pytest.mark.slow
def test_what_a_person_does_outlives_a_change(federation: Federation, page: WebPage, tab: Any, tmp_path: Path) -> None:
    """A row that moves keeps the focus; an opened table and what was drawn stay while rounds come."""
    server, _ = federation
    tab.goto(f"{page.address}/clients?order=id&descending=1")
    tab.locator("#link[data-state=live]").wait_for()
    tab.locator("tr[id='client:edge-1'] th a").focus()
    with Workspace(tmp_path) as workspace:
        Daemon(workspace, server, "edge-2", labels={"site": "late"}).start()
        tab.locator("tr[id='client:edge-2']").wait_for()
    assert tab.evaluate("document.activeElement.textContent") == "edge-1"
    run = server.create("browser-stays", **TINY, stop={"rounds": 400})
    tab.goto(f"{page.address}/runs/{run}")
    tab.locator("figure[id='chart:accuracy'] canvas").wait_for()
    tab.locator("figure[id='chart:accuracy'] summary").click()
    tab.evaluate("window.drawn = document.querySelector(\"figure[id='chart:accuracy'] canvas\")")
    rows = tab.locator("figure[id='chart:accuracy'] tbody tr")
    rows.nth(rows.count() + 2).wait_for()
    assert tab.locator("figure[id='chart:accuracy'] details").evaluate("details => details.open")
    assert tab.evaluate("window.drawn.isConnected && window.drawn.width > 0")
    with server.admin() as admin:
        admin.runs.stop_run(run, "its test is over")


@pytest.mark.slow
def test_a_killed_coordinator_is_reported_and_awaited(federation: Federation, page: WebPage, tab: Any) -> None:
    """The page states the loss and keeps its values; it goes on by itself, and no event is lost or doubled."""
    server, daemons = federation
    server.create("browser-before", **TINY)
    server.completed("browser-before")
    tab.goto(f"{page.address}/events?all=1")
    tab.locator("#link[data-state=live]").wait_for()
    server.kill()
    notice = tab.locator("#notice")
    notice.wait_for(state="visible")
    assert "The coordinator does not answer" in notice.inner_text()
    assert tab.locator("#entries tr").count() > 0
    lost = tab.context.new_page()
    lost.goto(f"{page.address}/")
    assert "The coordinator does not answer" in lost.locator("h1").inner_text()
    server.serve()
    tab.locator("#link[data-state=live]").wait_for()
    notice.wait_for(state="hidden")
    for daemon in daemons:
        server.until_present(daemon.client_id)
    server.create("browser-after", **TINY)
    server.completed("browser-after")
    tab.locator("#entries tr", has_text="run completed").filter(has_text="browser-after").wait_for()
    with server.admin() as admin:
        expected = [str(entry.number) for entry in reversed(admin.history.list_history("", 0))]
    shown = tab.locator("#entries tr").evaluate_all("rows => rows.map(row => row.dataset.number)")
    assert shown == expected[: len(shown)]
    assert len(shown) > 20
    lost.get_by_role("heading", name="Is the model getting better?").wait_for()


@pytest.mark.slow
def test_an_ended_login_is_stated(federation: Federation, page: WebPage, tab: Any) -> None:
    """A page whose session is gone asks for a login when its stream is opened again, and does not try for ever."""
    tab.goto(f"{page.address}/clients")
    tab.locator("#link[data-state=live]").wait_for()
    tab.context.clear_cookies()
    tab.reload()
    assert tab.locator("#link").count() == 0, "a new page is refused"
    tab.context.add_cookies([{"name": name, "value": value, "url": page.address} for name, value in [cookie(page)]])
    tab.goto(f"{page.address}/clients")
    tab.locator("#link[data-state=live]").wait_for()
    tab.context.clear_cookies()
    tab.route("**/live?*", lambda route: route.fulfill(status=401, body="login"))
    tab.evaluate("import(document.querySelector('script[type=module]').src + '&again')")
    tab.locator("#notice", has_text="Your login has ended").wait_for()


def cookie(page: WebPage) -> tuple[str, str]:
    """Name and value of the session's cookie."""
    name, _, value = page.cookie.partition("=")
    return name, value


@pytest.mark.slow
def test_a_failure_of_a_devices_code_is_shown_with_its_line(
    federation: Federation, page: WebPage, tab: Any, tmp_path: Path
) -> None:
    """Type, message, file and line of the error, on the page of the run that waits for clients that can train."""
    server, _ = federation
    own: dict[str, Any] = {"options": {"fails": "loss"}, "labels": {"site": "unplugged"}}
    alone = {"clients_per_round": 1, "min_clients": 1, "quorum": 1}
    line = re.compile(r"RuntimeError: the sensor is unplugged.*tiny_task\.py, line \d+")
    with Workspace(tmp_path) as workspace:
        Daemon(workspace, server, "edge-broken", **own).start()
        server.until_present("edge-broken")
        run = server.create("browser-failure", labels={"site": "unplugged"}, round=alone)
        tab.goto(f"{page.address}/runs/{run}")
        tab.get_by_text(line).first.wait_for()
        with server.admin() as admin:
            admin.runs.stop_run(run, "its test is over")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_is_accessible(
    federation: Federation, page: WebPage, open_context: Callable[..., Any], tmp_path: Path, scheme: str, width: int
) -> None:
    """axe-core finds nothing (WCAG 2.1 A and AA), and no view is wider than its screen."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    server, _ = federation
    known = {run.run_id for run in all_runs(server)}
    if "browser-axe" not in known:
        server.create("browser-axe", evaluation={"clients_every": 1}, **TINY)
        server.completed("browser-axe")
        make_key(tmp_path / "key.pem")
        signed = ("--sign-key", str(tmp_path / "key.pem"), "--server", str(server.settings["admin_listen"]))
        assert run_fl("release", "browser-axe", *signed, "--insecure", folder=tmp_path).returncode == 0
    context = open_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    tab = context.new_page()
    found: list[str] = []
    for path in ("/", "/runs", "/runs/browser-axe", "/compare?run=browser-axe", "/clients", "/clients/edge-0",
                 "/releases", "/releases?model=Tiny&version=1", "/events", "/nothing"):  # fmt: skip
        tab.goto(page.address + path)
        if path.startswith(("/runs/", "/compare")):
            tab.locator("canvas").first.wait_for()
            tab.locator("summary").evaluate_all("all => all.forEach(each => { each.parentElement.open = true; })")
        response = axe.Axe().run(tab, options={"runOnly": {"type": "tag", "values": RULES}}).response
        found += [f"{path}: {each['id']}: {each['help']}: {_nodes(each)}" for each in response["violations"]]
        if path.startswith("/releases"):
            assert tab.get_by_text("Tiny").count()
        wide = tab.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            found.append(f"{path}: {wide} pixels wide")
        if path.startswith("/clients/") and (left := tab.evaluate(LONG_NAME)) < width / 3:
            found.append(f"{path}: a long name leaves {left} pixels for its value")
    assert found == []


def _nodes(violation: dict[str, Any]) -> str:
    """The first elements of a violation, and what is wrong with them."""
    return "; ".join(f"{node['html'][:150]} {node['failureSummary'][:150]}" for node in violation["nodes"][:3])


def all_runs(server: Coordinator) -> list[Any]:
    """All runs."""
    with server.admin() as admin:
        return list(admin.runs.list_runs())


@pytest.mark.slow
def test_every_view_works_without_javascript(
    federation: Federation, page: WebPage, open_context: Callable[..., Any]
) -> None:
    """Links, forms and tables are enough: from the federation to a run, a comparison and a client."""
    server, _ = federation
    if "browser-plain" not in {run.run_id for run in all_runs(server)}:
        server.create("browser-plain", **TINY)
        server.completed("browser-plain")
    context = open_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.address)
    tab.get_by_role("link", name="browser-plain").first.click()
    tab.locator("figure[id='chart:accuracy'] summary").click()
    assert tab.locator("figure[id='chart:accuracy'] tbody tr").count() == 3
    tab.get_by_role("link", name="Compare").last.click()
    tab.get_by_label("Axis").select_option("bytes")
    tab.get_by_role("button", name="Compare").click()
    assert re.search(r"x=bytes", tab.url)
    assert tab.locator("#outcome tbody tr").first.inner_text().startswith("browser-plain")
    tab.get_by_role("link", name="Clients").click()
    tab.get_by_label("Search").fill("EDGE-1")
    tab.get_by_role("button", name="Filter").click()
    assert tab.locator("table.clients tbody tr").count() == 1
    tab.get_by_role("link", name="edge-1", exact=True).click()
    assert "edge-1" in tab.locator("h1").inner_text()
