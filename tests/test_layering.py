"""Who may import whom. Read from the source, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "protos": set(),
    "algorithms": set(),
    "tasks": set(),
    "fl_server": {"protos", "algorithms", "tasks"},
    "fl_client": {"protos", "algorithms", "tasks"},
    "fl_ops": {"protos", "algorithms", "tasks", "fl_server", "fl_client"},
}
"""Room -> other rooms that it may import."""

ONLY_STDLIB = [
    "fl_server/rounds.py",
    "fl_server/round_collecting.py",
    "fl_server/round_committing.py",
    "fl_server/round_drawing.py",
    "fl_server/round_rule.py",
    "fl_server/round_state.py",
    "fl_server/round_steering.py",
    "fl_server/over_selection.py",
    "fl_server/stop_rules.py",
    "fl_server/sampling.py",
    "fl_server/roster.py",
    "fl_server/events.py",
]
"""Files that decide rounds: they run, and are tested, with nothing installed."""

KNOW_GRPC = {
    "admin.py",
    "admin_client.py",
    "app.py",
    "errors.py",
    "health.py",
    "interceptors.py",
    "service.py",
    "tls.py",
    "transport.py",
}
"""Names of files that may know the transport; the generated stubs do too."""

NO_EFFECTS = {"asyncio", "datetime", "grpc", "http", "io", "os", "pathlib", "pickle", "shutil", "socket", "sqlite3",
              "subprocess", "tempfile", "threading", "time", "urllib"}  # fmt: skip
"""What the mathematics never needs: files, clocks, threads, networks."""

IMPORT_BY_NAME = {"fl_client/gates/nvml.py", "protos/traces.py", "tasks/loading.py", "tasks/torchvision_compat.py"}
"""Files that import a module whose name is a value; of these one takes the name from elsewhere."""

LOAD_TASKS = {"fl_client/data.py", "fl_server/runs/task_loading.py", "tasks/__init__.py"}
"""Files of the coordinator and the daemon that turn a name into a task: where one from the wire would be loaded."""

SOURCES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py")) if "_pb2" not in path.name]
"""Every module that a person wrote."""


def name_of(path: Path) -> str:
    """The path as people say it, from the repository's root."""
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever it does so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(ROOT).parts[: -node.level]) if node.level else ""
            found.add(".".join(filter(None, [package, node.module])))
    return found


def tops(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {name.partition(".")[0] for name in imports(path)}


def existing(names: list[str]) -> list[str]:
    """Those of the files that are there."""
    return [name for name in names if (ROOT / name).exists()]


every_source = pytest.mark.parametrize("path", SOURCES, ids=name_of)


def test_there_is_something_to_check() -> None:
    """The rules below would hold for an empty list."""
    assert {name_of(path) for path in SOURCES} >= {"protos/codec.py", "algorithms/base.py", "fl_server/rounds.py"}


@every_source
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    """Dependencies point one way; server and client never import each other."""
    room = path.relative_to(ROOT).parts[0]
    assert tops(path) & MAY_IMPORT.keys() <= MAY_IMPORT[room] | {room}


@every_source
def test_only_the_edge_knows_the_transport(path: Path) -> None:
    """Everything else can be tested without a network, and would outlive another transport."""
    knows = "grpc" in tops(path) or any(name.endswith("_pb2_grpc") for name in imports(path))
    assert not knows or path.name in KNOW_GRPC


@every_source
def test_nothing_unpickles(path: Path) -> None:
    """What came over the wire or from a disk is never executed."""
    assert not tops(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def uses(path: Path, *names: str) -> bool:
    """Whether a file imports or looks up one of these names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name)}
    found |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return bool(found & set(names))


def test_names_become_code_in_few_places() -> None:
    """Nothing that comes over the wire is imported or called but by the one check of tasks."""
    by_name = ("import_module", "__import__", "spec_from_file_location")
    assert {name_of(path) for path in SOURCES if uses(path, *by_name)} == IMPORT_BY_NAME
    loading = {name_of(path) for path in SOURCES if uses(path, "load_task")}
    assert {name for name in loading if not name.startswith("fl_ops/")} == LOAD_TASKS


@pytest.mark.parametrize("path", [path for path in SOURCES if name_of(path).startswith("algorithms/")], ids=name_of)
def test_the_mathematics_has_no_effects(path: Path) -> None:
    """Tensors in, tensors out: the same numbers on every machine and in every simulation."""
    assert not tops(path) & NO_EFFECTS


@pytest.mark.parametrize("name", existing(ONLY_STDLIB))
def test_the_round_needs_the_standard_library_only(name: str) -> None:
    """What decides about rounds imports its own kind, the standard library, and no asyncio."""
    own = {file.removesuffix(".py").replace("/", ".") for file in ONLY_STDLIB}
    outside = {name.partition(".")[0] for name in imports(ROOT / name) - own}
    assert outside <= set(sys.stdlib_module_names) - {"asyncio"}


@pytest.mark.parametrize("module", ["algorithms", "fl_server.rounds"])
def test_it_imports_where_grpc_is_not_installed(module: str) -> None:
    """None in sys.modules makes an import fail as a missing package does, whoever asks for it."""
    code = f"import sys; sys.modules['grpc'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_whose_task_needs_none_of_it_imports_no_torchvision() -> None:
    """Nor scikit-learn, of which digits only reads a file: each costs a device about a second and 80 MB."""
    code = (
        "import sys, fl_client.app, fl_server.app; from tasks import load_task; load_task('digits').model();"
        "print(sorted({'torchvision', 'sklearn', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
