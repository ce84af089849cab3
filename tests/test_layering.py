"""The order of packages and modules: who may import whom, without cycles."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sources import MAY_IMPORT, graph, sources

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
        "second_accountant",
        "clients",
        "web",
        "enrollment",
        "leadership",
        "metrics",
        "audit",
        "aggregation",
        "pages",
        "statuses",
        "store",
        "run_settings",
        "rounds",
        "oidc",
        "settings",
        "identity",
        "timeouts",
        "errors",
    ),
    "fl_client": (
        "__main__",
        "app",
        "setup",
        "daemon",
        "assignments",
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
