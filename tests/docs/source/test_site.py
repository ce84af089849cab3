"""docs/source/site.py: the pages as MkDocs gets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.source import site


def test_every_page_and_what_it_links_to_is_collected(tmp_path: Path) -> None:
    """Links of a collected page hold in the new folder, but for those to folders of code, which become text."""
    site.collect(tmp_path)
    assert {page.relative_to(site.ROOT) for page in site.pages()} == {
        page.relative_to(tmp_path) for page in tmp_path.rglob("*.md")
    }
    for page in tmp_path.rglob("*.md"):
        for _, link, _ in site.LINK.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / link).is_file(), f"{page}: {link}"


def test_a_dead_link_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its page."""
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("[gone](docs/gone.md)")
    with pytest.raises(FileNotFoundError, match=r"README.md: expected a file at docs/gone.md"):
        site.collect(tmp_path / "pages")
