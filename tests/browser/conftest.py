"""A browser, a coordinator with two daemons, and the web page. Skipped where there is no Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace
from tests.processes.web_page import WebPage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser without a window. Not for longer than a module: its event loop would run during other tests."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: `make tools` installs Debian's")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        # No sandbox: tests may run as root. The pages are our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Coordinator, list[Daemon]]]:
    """A coordinator and two daemons."""
    with Workspace(tmp_path_factory.mktemp("browser")) as workspace:
        server = Coordinator(workspace).serve()
        daemons = []
        for index in range(2):
            shard = {"partition": {"method": "iid", "clients": 2, "seed": 1}, "index": index}
            own: dict[str, Any] = {"options": {"kept": 8, "step_s": 0.02}, "labels": {"site": f"lab-{index}"}}
            daemons.append(Daemon(workspace, server, f"edge-{index}", shard=shard, **own).start())
        for daemon in daemons:
            server.until_present(daemon.client_id)
        yield server, daemons


@pytest.fixture(scope="module")
def page(federation: tuple[Coordinator, list[Daemon]]) -> Iterator[WebPage]:
    """The web page."""
    server, daemons = federation
    with WebPage(str(server.settings["admin_listen"]), daemons[0].folder) as page:
        yield page


@pytest.fixture
def open_context(chromium: Any, page: WebPage) -> Iterator[Callable[..., Any]]:
    """Opens a browser with these options that has logged in."""
    name, _, value = page.cookie.partition("=")
    with ExitStack() as stack:

        def opened(**options: Any) -> Any:
            context = chromium.new_context(**options)
            stack.callback(context.close)
            context.add_cookies([{"name": name, "value": value, "url": page.address}])
            return context

        yield opened


@pytest.fixture
def tab(open_context: Callable[..., Any]) -> Iterator[Any]:
    """A page of the browser. The test fails if a script fails, or if the page asks another server for anything."""
    tab = open_context(viewport={"width": 1280, "height": 900}).new_page()
    tab.set_default_timeout(60_000)
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda request: errors.append(request.url) if "127.0.0.1" not in request.url else None)
    yield tab
    assert errors == []
