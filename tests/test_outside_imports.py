"""Which modules may import grpc, effects, and code by its name; what a process loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sources import ROOT, foreign, imports, names_used, sources, within

KNOW_GRPC = (
    "fl_server.server",
    "fl_server.errors",
    "fl_server.rpc",
    "fl_server.statuses",
    "fl_server.worker",
    "fl_server.enrollment.calls",
    "fl_server.web.page",
    "fl_client.connection",
    "fl_client.errors",
    "fl_ops.admin",
    "fl_web.access",
    "fl_web.coordinator",
    "fl_web.process",
    "benchmarks",
)
"""Modules and packages that may import grpc or the generated stubs."""

ROUNDS = ("fl_server.rounds", "fl_server.clients.roster")
"""Modules and packages that decide rounds. They import one another and the standard library."""

NO_EFFECTS = {"asyncio", "datetime", "grpc", "http", "io", "os", "pathlib", "pickle", "shutil", "socket", "sqlite3",
              "subprocess", "tempfile", "threading", "time", "urllib"}  # fmt: skip
"""Modules that the mathematics does not import: files, clocks, threads, networks."""


IMPORT_BY_NAME = {
    "fl_client.gates.gpu",
    "fl_extensions.importing",
    "fl_ops.commands.places",
}
"""Modules that import a module by a computed name. Only `fl_extensions.importing` gets the name from outside."""

LOAD_TASKS = {
    "fl_client.training.data",
    "fl_server.aggregation.outside_task.child",
    "fl_server.runs.loading",
    "fl_tasks",
}
"""Modules of the coordinator and the daemon that load a task by its name."""

LOAD_METHODS = {
    "fl_client.training.methods",
    "fl_server.runs.loading",
    "fl_extensions.methods",
}
"""The same for methods, reducers and optimizers from outside."""


def test_only_the_edges_know_grpc() -> None:
    """Everything else can be tested without a network."""
    stubs = {
        module for module in sources() if any("_pb2_grpc" in f"{source}.{name}" for source, name in imports(module))
    }
    users = {module for module in sources() if "grpc" in foreign()[module]} | stubs
    assert {module for module in users if not within(module, KNOW_GRPC)} == set()


def test_few_modules_import_by_name() -> None:
    """No name from the wire is imported or called, except by the one check of code from outside."""
    used = {module: names_used(module) for module in sources()}
    by_name = {"import_module", "__import__", "spec_from_file_location"}
    assert {module for module in sources() if used[module] & by_name} == IMPORT_BY_NAME
    loading = {module for module in sources() if "load_task" in used[module]}
    assert {module for module in loading if not within(module, ["fl_ops", "benchmarks"])} == LOAD_TASKS
    loading = {module for module in sources() if used[module] & {"load_method", "load_reducer", "attribute_of"}}
    assert {module for module in loading if not within(module, ["fl_ops", "benchmarks", "fl_tasks"])} == LOAD_METHODS


def test_the_mathematics_has_no_effects() -> None:
    """Tensors in, tensors out: the same numbers on every machine and in every simulation."""
    effects = {module for module in sources() if within(module, ["algorithms"]) and foreign()[module] & NO_EFFECTS}
    # The guard around code from outside tells Ctrl-C by its thread.
    assert effects == {"algorithms.outside_code"}


def test_rounds_need_only_the_standard_library() -> None:
    """The decisions of a round run, and are tested, with nothing installed. They do no I/O."""
    allowed = set(sys.stdlib_module_names) - {"asyncio"}
    for module in (module for module in sources() if within(module, ROUNDS)):
        outside = {source for source, name in imports(module) if not within(source, ROUNDS)}
        assert {source.partition(".")[0] for source in outside} <= allowed, module


def run(code: str) -> str:
    """Run Python code in a new process; returns its output."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_algorithms_and_rounds_import_without_grpc() -> None:
    """They import without grpc: None in sys.modules makes an import fail like a missing package."""
    run("import sys; sys.modules['grpc'] = None; import algorithms, fl_server.rounds.machine")


@pytest.mark.slow
def test_no_process_imports_torchvision_without_need() -> None:
    """Scikit-learn neither: the digits task reads one of its files. Each import costs a device a second and 80 MB."""
    code = (
        "import sys, fl_client.app, fl_server.app; from fl_tasks import load_task; load_task('digits').model();"
        "print(sorted({'torchvision', 'sklearn', 'scipy'} & set(sys.modules)))"
    )
    assert run(code) == "[]\n"


def test_the_set_up_of_a_device_starts_without_torch_and_grpc() -> None:
    """`fl-client --help` and `doctor` are quick, and `doctor` can set up grpc's own messages before it is loaded."""
    code = "import sys, fl_client.setup.commands; print(sorted({'torch', 'grpc'} & set(sys.modules)))"
    assert run(code) == "[]\n"
