"""`make release`: the version comes from the tag, and two builds have the same bytes."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from distribution import release
from tests.test_dependencies import PROJECT

ROOT = Path(__file__).parents[2]
PYPROJECT = '[project]\nversion = "1.2.3"\n'
in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")


@pytest.mark.parametrize(
    ("tags", "changelog", "outcome"),
    [
        ([], "", "1.2.3"),
        (["v1.2.3", "other"], "\n## [1.2.3] - 2026-11-27\n", "1.2.3"),
        (["v1.2.4"], "", "has the tag v1.2.4, and pyproject.toml 1.2.3"),
        (["v1.2.3"], "\n## [Unreleased]\n", "CHANGELOG.md has no section '## [1.2.3] - DATE'"),
    ],
)
def test_the_version_is_that_of_the_tag(tags: list[str], changelog: str, outcome: str) -> None:
    """Tag, pyproject.toml and CHANGELOG.md have to agree."""
    try:
        shown = release.version_of(tags, PYPROJECT, changelog)
    except SystemExit as stopped:
        shown = str(stopped.code)
    assert outcome in shown


def test_an_sdist_does_not_depend_on_who_packed_it(tmp_path: Path) -> None:
    """Times, users, modes and the order of members are made equal; contents stay."""
    for number, names in enumerate((["a", "b"], ["b", "a"])):
        with tarfile.open(tmp_path / f"{number}.tar.gz", "w:gz") as packed:
            for name in names:
                path = tmp_path / name
                path.write_text(name)
                os.utime(path, (number, number))
                packed.add(path, name)
        release.normalize(tmp_path / f"{number}.tar.gz", seconds=7)
    first, second = ((tmp_path / f"{number}.tar.gz").read_bytes() for number in (0, 1))
    assert first == second
    with tarfile.open(tmp_path / "0.tar.gz") as packed:
        content = packed.extractfile("b")
        assert content is not None
        assert (packed.getnames(), content.read()) == (["a", "b"], b"b")


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    """A release stops where two builds have different bytes."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.whl").write_text(folder)
    with pytest.raises(SystemExit, match=r"different bytes: x\.whl"):
        release.require_equal([tmp_path / "one/x.whl"], [tmp_path / "two/x.whl"])


@in_git
@pytest.mark.slow
def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    """Wheel and sdist of the same commit are equal, have all packages of the commit, and the version."""
    first = release.build("9.9.9", tmp_path / "first")
    release.require_equal(first, release.build("9.9.9", tmp_path / "a second"))
    (wheel,) = [path for path in first if path.suffix == ".whl"]
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name.split("/")[0] for name in names if name.endswith(".py")}
    assert wheel.name == "impetus_fl-9.9.9-py3-none-any.whl"
    assert packages == {
        *("algorithms", "fl_client", "fl_common", "fl_extensions", "fl_ops", "fl_server", "fl_tasks", "fl_web"),
        "protos",
    }
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD", *packages],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    missing = {name for name in listed.stdout.splitlines() if not name.endswith((".sh", ".binpb"))} - names
    assert missing == set()


def test_the_bill_has_the_packages_of_the_coordinator() -> None:
    """Every requirement of the extra "server" is in the bill of materials, with the release's version."""
    bill = release.bill("9.9.9")
    assert '"version": "9.9.9"' in bill
    for requirement in PROJECT["optional-dependencies"]["server"]:
        assert f'"name": "{requirement.partition(">")[0]}"'.lower() in bill.lower()


def test_no_page_has_pip_ask_an_index_for_this_software() -> None:
    """Pages name the wheel's file: an index has no such package, and anybody could add one of that name."""
    pages = [path for path in ROOT.rglob("*.md") if ".venv" not in path.parts and "node_modules" not in path.parts]
    named = [
        str(path) for path in pages if "pip install" in path.read_text() and "install impetus-fl" in path.read_text()
    ]
    quoted = [str(path) for path in pages if "install 'impetus-fl[" in path.read_text()]
    assert (named, quoted) == ([], [])
