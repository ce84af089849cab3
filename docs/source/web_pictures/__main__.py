"""Takes the pictures of the web page again: `python -m docs.source.web_pictures`.

The program starts a coordinator and eight daemons on this machine. With --all FOLDER it takes every view at two
widths, light and dark, in whole length, to be looked at, and leaves the pictures of the documentation as they are.
With --link it takes the pictures of a page that is served already. Needs Chromium and the packages of the extra `dev`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from docs.source.web_pictures import pictures
from docs.source.web_pictures.federation import federation


def main() -> None:
    """Parse the command line, start a federation or use one, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="take every view, for the eye")
    parser.add_argument("--only", metavar="REGEX", default="", help="with --all: views whose names match")
    parser.add_argument("--link", help="login link of a page that is served, which no browser has used")
    parser.add_argument("--rounds", type=int, default=30, help="of the runs that end")
    parser.add_argument("--wait", action="store_true", help="afterwards keep the federation until a key is pressed")
    options = parser.parse_args()
    with _served(options) as link:
        pictures.take_all(link, options.all, options.only) if options.all else pictures.take_for_documentation(link)
        if options.wait:
            input("Enter ends the federation. ")


@contextmanager
def _served(options: argparse.Namespace) -> Iterator[str]:
    if options.link:
        yield options.link
        return
    with tempfile.TemporaryDirectory() as folder:
        tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731 - one line
        with federation(Path(folder), options.rounds, tell) as link:
            yield link


if __name__ == "__main__":
    main()
