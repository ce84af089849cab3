"""Takes pictures of the web page with Chromium: those of the documentation, or every view for the eye."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from PIL import Image
from playwright.sync_api import sync_playwright

from docs.source.web_pictures.federation import COMPARED, FAILING, MODEL, NEWEST, PRIVATE, SECURE, SICK, WAITING

IMAGES = Path(__file__).parents[2] / "images"
_DESKTOP, _PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
_DRAWN_MS = 2500
"""Until the charts are drawn and the stream is open."""
_COMPARE = f"/compare?{urlencode([('run', run) for run in COMPARED])}"
_OPEN = "document.querySelectorAll('main > details, details.more-charts').forEach(part => part.open = true)"
_View = tuple[str, str, dict[str, int]]
"""(path, colour scheme, size of the window)."""
_DOCUMENTATION: dict[str, _View] = {
    "web-first": ("/", "light", {"width": 1280, "height": 600}),  # the README's, which must stay low
    "web-federation": ("/", "light", {"width": 1280, "height": 860}),
    "web-run": (f"/runs/{NEWEST}", "light", {"width": 1280, "height": 1380}),
    "web-run-phone": (f"/runs/{NEWEST}", "dark", _PHONE),
}
"""By the file's name."""
_VIEWS: dict[str, str] = {
    "federation": "/",
    "runs": "/runs",
    "run": f"/runs/{NEWEST}",
    "run-private": f"/runs/{PRIVATE}",
    "run-secure": f"/runs/{SECURE}",
    "run-waiting": f"/runs/{WAITING}",
    "compare": _COMPARE,
    "compare-empty": "/compare",
    "clients": "/clients",
    "client-failing": f"/clients/{FAILING}",
    "client-quarantined": f"/clients/{SICK}",
    "releases": "/releases",
    "release": f"/releases?{urlencode({'model': MODEL, 'version': 1})}",
    "events": "/events",
    "missing": "/runs/no-such-run",
}


@dataclass
class _Camera:
    """A browser that has logged in."""

    browser: Any
    session: Any
    address: str

    def take(self, view: _View, opened: bool = False, whole: bool = False) -> Image.Image:
        """One picture. opened: with everything that is folded up. whole: of the page, not of the window."""
        path, scheme, size = view
        context = self.browser.new_context(viewport=size, color_scheme=scheme, storage_state=self.session)
        tab = context.new_page()
        tab.goto(self.address + path)
        if opened:
            tab.evaluate(_OPEN)
        tab.wait_for_timeout(_DRAWN_MS)
        wider = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if wider > 0:
            sys.stderr.write(f"{path} is {wider} pixels wider than the window of {size['width']}\n")
        content = bytes(tab.screenshot(full_page=whole))
        context.close()
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        return picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)


@contextmanager
def _camera(link: str) -> Iterator[_Camera]:
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        first = browser.new_context()
        page = first.new_page()
        page.goto(link)
        if page.locator("form button").count():
            page.locator("form button").first.click()
        page.wait_for_load_state()
        address = urlsplit(link)
        yield _Camera(browser, first.storage_state(), f"{address.scheme}://{address.netloc}")
        browser.close()


def take_for_documentation(link: str) -> None:
    """Write the pictures of the documentation."""
    with _camera(link) as camera:
        for name, view in _DOCUMENTATION.items():
            camera.take(view).save(IMAGES / f"{name}.png", optimize=True)


def take_all(link: str, folder: Path, only: str = "") -> None:
    """Write every view in whole length, at two widths, light and dark; prints the views that are too wide."""
    folder.mkdir(parents=True, exist_ok=True)
    with _camera(link) as camera:
        for name, path in ((name, path) for name, path in _VIEWS.items() if re.search(only, name)):
            for size in (_DESKTOP, _PHONE):
                for scheme in ("light", "dark"):
                    picture = camera.take((path, scheme, size), whole=True)
                    picture.save(folder / f"{name}-{size['width']}-{scheme}.png")
            camera.take((path, "light", _DESKTOP), opened=True, whole=True).save(folder / f"{name}-opened.png")
