"""README.md and the index of pages: commands run, named files exist, every page is listed, and no link is dead."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from PIL import Image

from fl_tasks import Shard, load_task
from fl_tasks.batches import batches
from fl_tasks.data.examples import Examples
from fl_tasks.evaluation import evaluate
from tests.docs.pages import DOCS, ROOT, File, read_page, steps
from tests.sources import MAY_IMPORT
from tests.test_layering import LAYERS

README = read_page("README.md")
INDEX = read_page("docs/README.md")
K8S = ["k8s/README.md", "k8s/production.md", "k8s/operate.md", "k8s/images/README.md"]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *K8S, *DOCS]


FIRST_SCREEN = README[: README.index("## ")]


def test_the_task_of_the_first_screen_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved as its comment says, and takes a step on a device's folder and an evaluation of the coordinator."""
    [(name, text)] = [(step.name, step.text) for step in steps(FIRST_SCREEN) if isinstance(step, File)]
    assert len([line for line in text.splitlines() if line.strip()]) <= 11  # ten, and the comment
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / name).write_text(text)
    for file in ("train.pt", "held-out.pt"):
        torch.save((torch.randn(6, 13), torch.arange(6) % 3), tmp_path / file)
    task = load_task("my_task:Wine", {})
    sys.modules.pop("my_task")
    model = task.model()
    examples = task.train_data(Shard(folder=tmp_path))
    assert isinstance(examples, Examples)
    for inputs, targets in batches(examples, 3, seed=0, steps=1):
        task.loss(model(inputs), targets).backward()
    for held_out in (task.eval_data(), task.eval_data(Shard(folder=tmp_path))):
        assert held_out is not None
        assert evaluate(task, model, held_out)["loss"] > 0


def test_the_first_screen_has_one_picture_of_at_most_600_pixels() -> None:
    """A reader sees commands, task and picture without a second screen of pixels."""
    [picture] = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert picture in FIRST_SCREEN
    with Image.open(ROOT / picture) as image:
        assert image.height <= 600


def test_every_make_target_that_is_named_exists() -> None:
    """`make something` on a page is a target of the Makefile."""
    named = {target for page in PAGES for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", read_page(page))}
    targets = set(re.findall(r"^([a-z-]+):", read_page("Makefile"), re.MULTILINE))
    assert {first or second for first, second in named} <= targets
    assert {"demo", "test", "install"} <= targets


def test_every_dependency_has_its_reason() -> None:
    """What pyproject.toml installs for users is in the table of the architecture page, and nothing else is."""
    project = tomllib.loads(read_page("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(requirement for name, extra in extras.items() if name != "dev" for requirement in extra),
    ]
    page = read_page("docs/development/architecture.md")
    table = page[page.index("| package | reason |") : page.index("`constraints.txt`")]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)[2:]
    names = {Requirement(text).name for text in wanted} - {project["name"]}  # an extra may contain another one
    assert names == {name for row in rows for name in row.split(", ")}


def test_the_index_has_every_page_once() -> None:
    """docs/README.md has one line for each page, under the heading of its folder. configuration.md is above them.

    The pages of decisions are listed in decisions.md.
    """
    introduction, *sections = INDEX.split("\n## ")
    assert "](configuration.md)" in introduction
    rows = [
        (section.partition("\n")[0].lower(), link)
        for section in sections
        for link in re.findall(r"^- \[[^]]+\]\((\w[^)]+)\): ", section, re.MULTILINE)
    ]
    decisions = re.findall(r"^- \[[^]]+\]\(([^)]+)\): ", read_page("docs/development/decisions.md"), re.MULTILINE)
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
        folders = [layer for layer in LAYERS[package] if (ROOT / package / layer / "__init__.py").is_file()]
        assert re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE) == folders


@pytest.mark.parametrize("page", PAGES)
def test_no_link_is_dead(page: str) -> None:
    """The file of a relative link, its heading, and a path in code that looks like one of the repository's files."""
    text, folder = read_page(page), (ROOT / page).parent
    for link, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = folder / link if link else ROOT / page
        assert target.exists(), link
        if heading and target.suffix == ".md":
            assert heading in headings(target), f"{link}#{heading}"
    for path in re.findall(r"`((?:protos|algorithms|fl_\w+|tests|docs|benchmarks|k8s)/[\w./-]+)`", text):
        assert (ROOT / path).exists() or "NAME" in path, path


@cache
def headings(page: Path) -> set[str]:
    """The names of a page's headings in links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in plain}
