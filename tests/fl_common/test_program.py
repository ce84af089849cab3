"""The start of the three programs: Ctrl-C while they load, and --version."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
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
        ("fl_server", "pydantic", []),
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


@pytest.mark.parametrize("kind", ["spawn", "forkserver"])
def test_helpers_import_nothing_from_the_working_directory(tmp_path: Path, kind: str) -> None:
    """`multiprocessing` starts its helpers with `python -c`, which looks in the working directory first."""
    made = tmp_path / "made"
    for name in ("multiprocessing", "signal", "struct", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(made)!r}, 'w')\nraise SystemExit(3)\n")
    code = (
        "from fl_common.program import keep_working_directory_out as keep\nimport multiprocessing\nkeep()\n"
        f"process = multiprocessing.get_context({kind!r}).Process(target=print, args=('worked',))\n"
        "process.start()\nprocess.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, made.exists()) == ("worked\n", "", False)


@pytest.mark.parametrize("program", ["fl_server", "fl_client", "fl_ops"])
def test_each_program_keeps_the_working_directory_out(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything else, so that every process that it starts has it."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr("sys.argv", [program, "--version"])
    with pytest.raises(SystemExit):
        import_module(f"{program}.__main__").main()
    assert os.environ["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize(
    ("program", "command", "made"),
    slow_except(
        [
            (*program, made)
            for program in (("fl_server", "fl-server"), ("fl_client", "fl-client"), ("fl_ops", "fl"))
            for made in ("algorithms/__init__.py", "protos/ours.proto", "protos.py")
        ],
        ("fl_server", "fl-server", "algorithms/__init__.py"),
        ("fl_client", "fl-client", "protos/ours.proto"),
        ("fl_ops", "fl", "protos.py"),
    ),
)
def test_a_package_of_another_project_is_named(tmp_path: Path, program: str, command: str, made: str) -> None:
    """A command that would import it in place of ours ends with 2 and says where it is and what to do."""
    file = tmp_path / made
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise RuntimeError('imported')\n")
    name = made.partition("/")[0].removesuffix(".py")
    # Our packages are found after those of the working directory, as in an installation that can be edited.
    code = (
        "import sys\nfrom importlib.machinery import PathFinder\nfrom runpy import run_module\n"
        "class Installed:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(ROOT)!r}] if path is None else path)\n"
        f"sys.meta_path.append(Installed())\nsys.argv = [{command!r}, '--version']\n"
        f"run_module({program!r}, run_name='__main__')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONSAFEPATH"}}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = file.parent if made.endswith(".proto") else file
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{command}: expected the package {name} of impetus in {ROOT / name}, got {found}, which Python finds first:"
        " rename that folder or file, or start from another folder, without it in PYTHONPATH\n"
    )


def test_every_python_that_is_started_leaves_the_working_directory_out() -> None:
    """`sys.executable` is followed by -P, or by -I, which means it too, wherever the product starts it."""
    packages = (
        "fl_common",
        "algorithms",
        "fl_extensions",
        "fl_tasks",
        "fl_server",
        "fl_client",
        "fl_web",
        "fl_ops",
        "k8s",
    )
    started = [
        (path.name, after)
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if "sys.executable" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        for after in _after_executable(node)
    ]
    assert {name for name, _ in started} >= {"process.py", "hashes.py", "sbom.py"}
    assert [start for start in started if start[1] not in {"'-P'", "'-I'"}] == []


def _after_executable(node: ast.AST) -> Iterator[str]:
    """What follows `sys.executable` in a list, a tuple or the arguments of a call."""
    parts = node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
    texts = [ast.unparse(part) for part in parts]
    yield from (after for before, after in pairwise(texts) if before == "sys.executable")


DIALS = """
from fl_common.program import silence_libraries
silence_libraries()
import grpc
credentials = grpc.ssl_channel_credentials(b"no certificate")
with grpc.secure_channel("127.0.0.1:1", credentials) as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=5)
    except grpc.RpcError:
        print("refused")
"""


@pytest.mark.parametrize("verbosity", [None, "ERROR"])
def test_lines_of_grpc_are_on_stderr_only_if_somebody_asks_for_them(verbosity: str | None) -> None:
    """A channel with an unusable certificate: grpc's core writes why, between our lines of JSON."""
    chosen = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    chosen |= {"GRPC_VERBOSITY": verbosity} if verbosity else {}
    done = subprocess.run(
        [sys.executable, "-c", DIALS], capture_output=True, text=True, cwd=ROOT, env=chosen, check=True
    )
    assert done.stdout == "refused\n"
    assert bool(done.stderr) == bool(verbosity), done.stderr
