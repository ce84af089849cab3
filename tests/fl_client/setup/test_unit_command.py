"""`fl-client unit`: shown, or written below a root directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fl_client.__main__ import main

ROOT = Path(__file__).parents[3]
PROGRAM = ["--program", "/opt/impetus/bin/fl-client"]


def test_a_unit_is_shown_before_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --install each file stands below its name, and nothing is written."""
    assert main(["unit", *PROGRAM, "--cuda"]) == 0
    shown = capsys.readouterr().out
    assert "# /etc/systemd/system/fl-client.service\n" in shown
    assert "# /etc/systemd/system/fl-client.service.d/10-cuda.conf\n" in shown


def test_a_unit_is_written_below_a_root(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """For an image: the files are written, and the command names them."""
    assert main(["unit", *PROGRAM, "--install", "--root", str(tmp_path), "--memory", "4G"]) == 0
    written = [line.removeprefix("wrote ") for line in capsys.readouterr().out.splitlines() if line.startswith("wrote")]
    assert {str(path) for path in tmp_path.rglob("*") if path.is_file()} == set(written)
    assert (tmp_path / "etc/systemd/system/fl-client.service.d/20-limits.conf").exists()


def test_a_program_hidden_from_the_service_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr that names the reason and another place, and exit code 2."""
    assert main(["unit", "--program", "/home/ann/bin/fl-client"]) == 2
    assert "the service cannot access /home, so it cannot read the program" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--config", "none.toml"], ["run", "--config", "none.toml"]])
def test_run_may_be_left_out(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """Both start the daemon, which reports that its settings file is missing."""
    assert main(arguments) == 2
    assert "fl-client: none.toml: expected a settings file there, found none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_daemon_does_not_load_the_setup() -> None:
    """The daemon loads neither the set-up package nor the libraries of its questions."""
    code = "import sys, fl_client.__main__, fl_client.app; print([m for m in sys.modules if m in sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", code, "fl_client.setup", "typer", "rich.prompt"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_help_comes_before_torch() -> None:
    """`fl-client doctor --help` must not take seconds."""
    code = "import sys; from fl_client.setup import commands; print([m for m in sys.modules if m in ('torch', 'grpc')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
