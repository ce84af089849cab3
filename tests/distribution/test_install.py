"""`make demo` and `make install`: what is installed, when, and with what, in a small project with the real Makefile."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distribution import install

ROOT = Path(__file__).parents[2]

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "impetus-fl"
version = "1"

[project.optional-dependencies]
demo = []
dev = []
"""

BACKEND = '''
"""Builds an editable wheel with the command fl, without any package of an index."""
import zipfile

FILES = {
    "fl_small.py": "def main(): print('the demo runs')",
    "impetus_fl-1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: impetus-fl\\nVersion: 1\\n"
    "Provides-Extra: demo\\nProvides-Extra: dev\\n",
    "impetus_fl-1.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "impetus_fl-1.dist-info/entry_points.txt": "[console_scripts]\\nfl = fl_small:main\\n",
}

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "impetus_fl-1-py3-none-any.whl"
    record = "".join(f"{file},,\\n" for file in [*FILES, "impetus_fl-1.dist-info/RECORD"])
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for file, text in {**FILES, "impetus_fl-1.dist-info/RECORD": record}.items():
            wheel.writestr(file, text)
    return name
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with our Makefile and installer, and no dependencies."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "distribution").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "distribution/install.py", tmp_path / "distribution")
    return tmp_path


def made(project: Path, target: str, path: str | None = None) -> str:
    """The output of `make TARGET`. path: the PATH of the environment."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", **({"PATH": path} if path else {})}
    done = subprocess.run(
        ["/usr/bin/env", "make", target, f"PYTHON={sys.executable}"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_uv() -> str:
    """The PATH without the folders that have uv."""
    return os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "uv").exists()
    )


@pytest.mark.slow
def test_an_installation_is_made_once_and_again_where_it_has_to_be(project: Path) -> None:
    """A second `make demo` installs nothing; changed constraints and an interrupted installation do."""
    first = made(project, "demo", without_uv())
    assert "installed for 'demo'" in first
    assert "the demo runs" in first
    assert "installed" not in made(project, "demo", without_uv())

    assert "installed for 'dev'" in made(project, "install", without_uv())
    assert "installed" not in made(project, "demo", without_uv())

    os.utime(project / "constraints.txt")
    os.utime(project / ".venv/demo", (0, 0))
    assert "installed for 'demo'" in made(project, "demo", without_uv())

    (project / ".venv/half").touch()
    (project / ".venv/installing").write_text("999999999")
    os.utime(project / ".venv/demo", (0, 0))
    assert "was interrupted" in made(project, "demo", without_uv())
    assert not (project / ".venv/half").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_uv_installs_where_it_is(project: Path) -> None:
    """With uv on the path, pip is not started."""
    assert "the demo runs" in made(project, "demo")
    assert not (project / ".venv/install.log").exists()


def test_an_installation_beside_another_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process that installs is named, and nothing is changed."""
    (tmp_path / "installing").write_text(str(os.getpid()))
    assert install.install(tmp_path, "demo") == 1
    assert f"process {os.getpid()} installs into" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["installing"]


def test_the_progress_has_the_packages_and_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """A line has the seconds and the latest step of pip."""
    lines = io.StringIO("Collecting torch>=2.9 (from x)\n  Downloading a/torch-2.whl (181.0 MB)\n")
    progress = install.Progress(lines, between_s=0.0)
    progress.show()
    assert "0 s  package 1: downloading torch-2.whl (181.0 MB)" in capsys.readouterr().out
    assert not progress.installing
    lines.write("Installing collected packages: a, b, torch\n")
    lines.seek(0)
    progress.show()
    assert "installing 3 packages" in capsys.readouterr().out
    assert progress.installing
