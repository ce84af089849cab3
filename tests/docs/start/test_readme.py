"""README.md and the index of pages: commands run, named files exist, every page is listed, and no link is dead."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docs.pages import DOCS, ROOT, Command, follow, on_free_ports, read_page, steps
from tests.test_layering import LAYERS, MAY_IMPORT

README = read_page("README.md")
INDEX = read_page("docs/README.md")
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "k8s/README.md", "k8s/images/README.md", *DOCS]


@pytest.mark.timeout(300)
def test_the_lines_for_a_laptop_work(tmp_path: Path) -> None:
    """One server and two clients, started block by block: both connect, ten rounds complete, a model exists."""
    laptop, ports = on_free_ports(README[README.index("## One server") : README.index("## Documentation")])
    both = ("edge-0 present ... edge-1 present",)
    todo = [
        replace(step, shown=both) if isinstance(step, Command) and step.text.startswith("fl clients") else step
        for step in steps(laptop)
    ]
    follow(todo, ports, tmp_path / "work")
    assert (tmp_path / "work" / "first.safetensors").stat().st_size > 0


def test_every_make_target_that_is_named_exists() -> None:
    """`make something` on a page is a target of the Makefile."""
    named = {target for page in PAGES for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", read_page(page))}
    targets = set(re.findall(r"^([a-z-]+):", read_page("Makefile"), re.MULTILINE))
    assert {first or second for first, second in named} <= targets
    assert {"demo", "test", "install"} <= targets


def test_every_dependency_has_its_reason() -> None:
    """What pyproject.toml installs for users is in the README's table, and nothing else is."""
    project = tomllib.loads(read_page("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(requirement for name, extra in extras.items() if name != "dev" for requirement in extra),
    ]
    table = README[README.index("| package | reason |") : README.index("`constraints.txt`")]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)[2:]
    assert {Requirement(text).name for text in wanted} == {name for row in rows for name in row.split(", ")}


def test_the_index_has_every_page_once() -> None:
    """docs/README.md has one row for each page, under the heading of its folder. configuration.md is above them.

    The pages of decisions are listed in decisions.md.
    """
    introduction, *sections = INDEX.split("\n## ")
    assert "](configuration.md)" in introduction
    rows = [
        (section.partition("\n")[0].lower(), link)
        for section in sections
        for link in re.findall(r"^\| \[[^]]+\]\((\w[^)]+)\) \| ", section, re.MULTILINE)
    ]
    decisions = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| ", read_page("docs/development/decisions.md"), re.MULTILINE)
    listed = [f"docs/{link}" for _, link in rows] + [f"docs/development/{link}" for link in decisions]
    assert sorted([*listed, "docs/README.md", "docs/configuration.md"]) == DOCS
    assert [(heading, link) for heading, link in rows if not link.startswith(f"{heading}/")] == []


def test_the_architecture_page_is_true() -> None:
    """It names every package with what it may import, and every package in coordinator and daemon, in layer order."""
    page = read_page("docs/development/architecture.md")
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE))
    named = {package: set(re.findall(r"`(\w+)`", text)) for package, text in rows.items()}
    named["fl_ops"] = MAY_IMPORT["fl_ops"]  # "all of the above"
    assert named == {package: used for package, used in MAY_IMPORT.items() if package != "benchmarks"}
    for package in ("fl_server", "fl_client"):
        table = page[page.index(f"| part of `{package}` |") :].partition("\n\n")[0]
        folders = [layer for layer in LAYERS[package] if (ROOT / package / layer).is_dir()]
        assert re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE) == folders


@pytest.mark.parametrize("page", PAGES)
def test_no_link_is_dead(page: str) -> None:
    """A relative link, and a path in code that looks like one of the repository's files, is there."""
    text, folder = read_page(page), (ROOT / page).parent
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (folder / link).exists(), link
    for path in re.findall(r"`((?:protos|algorithms|fl_\w+|tests|docs|benchmarks|k8s)/[\w./-]+)`", text):
        assert (ROOT / path).exists() or "NAME" in path, path
