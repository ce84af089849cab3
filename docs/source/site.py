"""Collects the pages of the repository for HTML: `make docs` calls it, then MkDocs.

    python -m docs.source.site build/pages

Every page keeps its path from the root, so its links hold. A file that a page links to is copied too. A link to a
folder of code becomes text, because there is no page of it.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^]\n]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def pages() -> list[Path]:
    """All pages: those of the root, of docs and of k8s, without generated folders."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "k8s").rglob("*.md")]
    return sorted(found)


def collect(target: Path) -> None:
    """Copy the pages and what they link to into an empty folder. Raises FileNotFoundError for a dead link."""
    shutil.rmtree(target, ignore_errors=True)
    for page in pages():
        place = target / page.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_with_files(page, target), encoding="utf-8")


def _with_files(page: Path, target: Path) -> str:
    """The text of a page; linked files that are no pages are copied."""

    def kept(link: re.Match[str]) -> str:
        linked = (page.parent / link[2]).resolve()
        if not linked.exists():
            raise FileNotFoundError(f"{page.relative_to(ROOT)}: expected a file at {link[2]}, found none")
        if linked.is_dir():
            return link[1]
        if linked.suffix != ".md":
            place = target / linked.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, place)
        elif linked not in every:
            return link[1]
        return link[0]

    every = set(pages())
    return LINK.sub(kept, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
