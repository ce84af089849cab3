"""Import rules: who may import whom without cycles, and who grpc, effects and code by its name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sources import MAY_IMPORT, ROOT, foreign, graph, imports, names_used, sources, within

LAYERS: Mapping[str, tuple[str, ...]] = {
    "fl_server": (
        "__main__",
        "backup",
        "worker",
        "app",
        "server",
        "rpc",
        "runs",
        "uploads",
        "run",
        "admission",
        "services",
        "outside_calls",
        "privacy_accounts",
        "clients",
        "web",
        "enrollment",
        "leadership",
        "metrics",
        "audit",
        "aggregation",
        "pages",
        "store",
        "run_settings",
        "rounds",
        "oidc",
        "settings",
        "identity",
        "errors",
    ),
    "fl_client": (
        "__main__",
        "app",
        "setup",
        "daemon",
        "assignments",
        "packages",
        "privacy",
        "ranks",
        "training",
        "secure_aggregation",
        "enrollment",
        "policy",
        "gates",
        "connection",
        "audit",
        "storage",
        "monitoring",
        "settings",
        "errors",
    ),
    "fl_web": (
        "__main__",
        "process",
        "sandbox",
        "serve",
        "app",
        "access",
        "live",
        "views",
        "rendering",
        "charts",
        "coordinator",
        "facts",
    ),
    "fl_ops": (
        "__main__",
        "commands",
        "notebook",
        "trackers",
        "compare",
        "demo",
        "landscape",
        "simulate",
        "new_package",
        "task_check",
        "exports",
        "admin",
        "certificates",
        "render",
        "files",
        "environment",
        "worker_process",
        "errors",
    ),
    "fl_ops.commands": ("cli", "places", "coordinator", "access", "local", "completion", "options"),
    "fl_ops.render": ("watching", "top", "tables", "releases", "plot", "rounds", "text", "fitted", "output", "figures"),
}
"""Sub-packages and modules of a package. Each imports only those behind it in the list."""

KNOW_GRPC = (
    "fl_server.server",
    "fl_server.errors",
    "fl_server.rpc",
    "fl_server.audit.calls",
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

ROUNDS = ("fl_server.rounds",)
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
    "fl_server.runs.creation",
    "fl_tasks",
}
"""Modules of the coordinator and the daemon that load a task by its name."""

LOAD_METHODS = {
    "fl_client.training.methods",
    "fl_server.runs.creation",
    "fl_extensions.methods",
}
"""The same for methods, reducers and optimizers from outside."""


def test_the_sources_are_found() -> None:
    """Without this, an empty list of modules would pass every rule below."""
    assert sources().keys() >= {"protos.codec", "algorithms.base", "fl_server.rounds.machine", "benchmarks.sweep"}
    assert "protos.wire" in graph()["fl_server.app"] | set().union(
        *(graph()[each] for each in graph()["fl_server.app"])
    )


def test_no_import_cycle() -> None:
    """Modules can be read, tested and changed from the bottom up."""
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


@cache
def package_names() -> set[str]:
    """Every package that holds a module or a package."""
    return {name.rpartition(".")[0] for name in sources()}


def siblings(module: str, used: str) -> tuple[str, str]:
    """The folders of two modules below the folder that both are in; equal if one folder is within the other."""
    packages = package_names()
    one, other = ((name if name in packages else name.rpartition(".")[0]).split(".") for name in (module, used))
    shared = next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
    return ("", "") if shared is None else (".".join(one[: shared + 1]), ".".join(other[: shared + 1]))


def test_no_cycle_of_folders() -> None:
    """Folders of one folder can be read from the bottom up, too."""
    edges: dict[str, set[str]] = {}
    for module in graph():
        for used in graph()[module]:
            folder, below = siblings(module, used)
            if folder:
                edges.setdefault(folder, set()).add(below)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(f"cycle of folders: {' -> '.join(reversed(error.args[1]))}")


def test_packages_import_only_what_the_table_allows() -> None:
    """Server and client never import each other, and shared packages import nothing of ours."""
    tops = [
        (module, module.partition(".")[0], each.partition(".")[0]) for module in graph() for each in graph()[module]
    ]
    assert [(module, used) for module, top, used in tops if used != top and used not in MAY_IMPORT[top]] == []


def layer(package: str, module: str) -> str:
    """The part of a package that a module of it belongs to."""
    return module.removeprefix(f"{package}.").partition(".")[0]


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_down_the_list_of_layers(package: str) -> None:
    """Each part of a package is in its list, and imports only parts behind it."""
    order = LAYERS[package]
    members = [module for module in sources() if module.startswith(f"{package}.")]
    assert {layer(package, module) for module in members} == set(order)
    edges = [(module, used) for module in members for used in graph()[module] if used.startswith(f"{package}.")]
    place = {module: order.index(layer(package, module)) for module in members}
    assert [(module, used) for module, used in edges if place[used] < place[module]] == []


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
