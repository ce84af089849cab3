"""The start of the three programs: Ctrl-C while they load, and --version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow_except

ROOT = Path(__file__).parents[2]
CODE = """
import os, signal, sys
from importlib import import_module

program, moment, *arguments = sys.argv[1:]

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == moment:
            print("loading", name, flush=True)
            os.kill(os.getpid(), signal.SIGINT)

main = import_module(f"{program}.__main__").main
sys.meta_path.insert(0, Interrupt())
sys.argv = [program, *arguments]
sys.exit(main())
"""
RUN = ["run", "list", "--insecure"]


@pytest.mark.parametrize(
    ("program", "moment", "arguments"),
    slow_except(
        [
            ("fl_ops", "typer", RUN),
            ("fl_ops", "fl_ops.render.tables", RUN),
            ("fl_ops", "grpc._cython", RUN),
            ("fl_ops", "torch", ["simulate", "run.toml"]),
            ("fl_ops", "torch.nn", ["simulate", "run.toml"]),
            ("fl_server", "pydantic", []),
            ("fl_server", "fl_server.app", []),
            ("fl_server", "torch", []),
            ("fl_server", "sqlalchemy", []),
            ("fl_client", "pydantic", []),
            ("fl_client", "fl_client.app", []),
            ("fl_client", "torch", []),
        ],
        ("fl_ops", "typer", RUN),
        ("fl_server", "fl_server.app", []),
        ("fl_client", "pydantic", []),
    ),
)
def test_an_interrupt_while_it_loads(tmp_path: Path, program: str, moment: str, arguments: list[str]) -> None:
    """The program ends with 130 and prints nothing, whatever it is importing."""
    settings = tmp_path / "settings.toml"
    settings.write_text(f'state_dir = "{tmp_path / "state"}"\ninsecure = true\n')
    if program == "fl_client":
        settings.write_text(settings.read_text() + 'client_id = "a"\nserver = "127.0.0.1:9"\n[task]\nname = "digits"\n')
    done = subprocess.run(
        [sys.executable, "-c", CODE, program, moment, *(arguments or ["--config", str(settings)])],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, f"loading {moment}\n", "")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("program", ["fl_ops", "fl_server", "fl_client"])
def test_version(program: str) -> None:
    """Without settings or a coordinator: the versions of the package, of the protocol and of Python."""
    done = subprocess.run(
        [sys.executable, "-m", program, "--version"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("impetus ")
    assert done.stdout.endswith(f", Python {sys.version.split()[0]}\n")
    assert ", protocol 1 to " in done.stdout
