"""Pictures of the web page for the documentation, taken with a browser from a page that is served.

    fl web --insecure                                  # prints the login link
    python -m docs.source.web_pictures LINK --run fedcm --compare fedcm --compare fedavg

Needs Chromium and the packages of the extra `dev`. The pictures have few colours, so that they are small.
"""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "images"
_COLOURS = 96
_DESKTOP, _PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
_DRAWN_MS = 2500
"""Until the charts are drawn and the stream is open."""


def pictures(run: str, compared: Sequence[str]) -> Mapping[str, tuple[str, str, dict[str, int]]]:
    """File name -> (path, colour scheme, size of the window)."""
    compare = f"/compare?{urlencode([('run', run) for run in compared])}"
    return {
        "web-first": (f"/runs/{run}", "light", {"width": 1280, "height": 470}),  # the README's, which must stay low
        "web-federation": ("/", "light", _DESKTOP),
        "web-run": (f"/runs/{run}", "light", {"width": 1280, "height": 1250}),
        "web-run-dark": (f"/runs/{run}", "dark", _DESKTOP),
        "web-compare": (compare, "light", _DESKTOP),
        "web-run-phone": (f"/runs/{run}", "dark", _PHONE),
    }


def take(browser: Any, session: Any, picture: tuple[str, str, dict[str, int]]) -> bytes:
    """One picture as PNG. session: the state of a browser that has logged in."""
    path, scheme, size = picture
    context = browser.new_context(viewport=size, color_scheme=scheme, storage_state=session)
    tab = context.new_page()
    tab.goto(path)
    tab.wait_for_timeout(_DRAWN_MS)
    content = bytes(tab.screenshot())
    context.close()
    return content


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link", help="login link that no browser has used")
    parser.add_argument("--run", required=True)
    parser.add_argument("--compare", action="append", default=[])
    options = parser.parse_args()
    wanted = pictures(options.run, options.compare or [options.run])
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        first = browser.new_context()
        first.new_page().goto(options.link)
        session, address = first.storage_state(), urlsplit(options.link)
        for name, (path, scheme, size) in wanted.items():
            picture = (f"{address.scheme}://{address.netloc}{path}", scheme, size)
            image = Image.open(io.BytesIO(take(browser, session, picture))).convert("RGB").quantize(_COLOURS)
            image.save(IMAGES / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
