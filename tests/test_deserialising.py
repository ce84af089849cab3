"""No code of the product turns bytes into calls: no pickle and its kin, read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("protos", "fl_common", "algorithms", "fl_extensions", "fl_tasks", "fl_server", "fl_client", "fl_web", "fl_ops"),
    *("k8s", "docs", "examples", "benchmarks"),
)

MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "copyreg", "shelve", "marshal", "dbm"),
    *("dill", "cloudpickle", "joblib", "jsonpickle", "yaml", "ruamel", "hickle", "klepto", "imp"),
    *("multiprocessing", "multiprocess", "torch.multiprocessing"),
    *("torch.package", "torch.hub", "torch.jit", "torch.distributed.rpc", "xmlrpc", "asyncore", "pandas"),
}
"""Modules that read pickles or run what they read. `multiprocessing` pickles what it sends."""

CALLS = {
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.export.load"),
    *("logging.config.listen", "logging.config.dictConfig", "logging.config.fileConfig"),
    *("eval", "exec", "compile", "__import__", "runpy.run_path", "runpy.run_module"),
}
NAMES = {"allow_pickle", "ProcessPoolExecutor", "broadcast_object_list", "all_gather_object", "gather_object"}
NAMES |= {"scatter_object_list", "send_object_list", "recv_object_list", "weights_only", "read_pickle"}

ALLOWED: Mapping[str, dict[str, str]] = {
    "fl_tasks/built_in/vision_files.py": {"pickle": "the unpickler of CIFAR's published files, which knows four names"},
    "fl_tasks/partitioning/file.py": {"allow_pickle": "is False"},
    "algorithms/batched/recording.py": {"torch.jit": "traces operations of our own; nothing is read from a file"},
    # Pipes and pools between a process and its own children: inherited, or behind a random key. No other user writes.
    "fl_tasks/data/reading.py": {"multiprocessing": "the workers of a data set"},
    "fl_server/aggregation/task_model.py": {"torch.multiprocessing": "as in the next line"},
    "fl_tasks/new_model.py": {"torch.multiprocessing": "a weak reference to a tensor's memory; nothing is sent"},
    "fl_ops/worker_process.py": {"multiprocessing": "a worker watches its parent"},
    "fl_ops/simulate/engines/worker.py": {"multiprocessing": "workers of a simulation"},
    "fl_ops/simulate/engines/workers.py": {"multiprocessing": "workers of a simulation"},
    "fl_ops/simulate/seeds.py": {"multiprocessing": "one process for each seed"},
    "fl_ops/compare/workers.py": {
        "multiprocessing": "one process for each cell", "ProcessPoolExecutor": "one process for each cell",
    },
    "fl_ops/demo/processes.py": {"multiprocessing": "the demo's coordinator and daemons"},
    "fl_ops/demo/child.py": {
        "runpy.run_module": "one of our programs, named by the demo itself",
    },
    "fl_ops/demo/faulty_client.py": {"runpy.run_module": "our daemon, whose task is spoilt for the demo"},
    "benchmarks/processes.py": {"runpy.run_module": "one of our programs, named by the benchmark itself"},
}  # fmt: skip
"""File -> what it may use, and why. Benchmarks may start processes of their own: see `_findings`."""


@pytest.fixture(scope="module")
def findings() -> dict[str, set[str]]:
    """File -> what it uses of MODULES, CALLS and NAMES."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)): found for path in files if (found := set(_findings(path)))}


def test_nothing_unpickles_or_runs_what_it_reads(findings: dict[str, set[str]]) -> None:
    """pickle, torch.load (also with weights_only), yaml, marshal, shelve, eval and their kin are only where allowed."""
    found = {name: used - ALLOWED.get(name, {}).keys() for name, used in findings.items()}
    assert {name: used for name, used in found.items() if used} == {}


def test_every_exception_is_needed(findings: dict[str, set[str]]) -> None:
    """An entry of ALLOWED that no code uses is removed."""
    assert {name: allowed.keys() for name, allowed in ALLOWED.items()} == {name: findings[name] for name in ALLOWED}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path, weights_only=True)",
        "from torch import load",
        "from torch import package",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import yaml",
        "eval(text)",
        "dist.all_gather_object(found, mine)",
        "def late():\n    import marshal",
    ],
)
def test_the_check_sees_each_form(tmp_path: Path, source: str) -> None:
    """An import in any form, a call by its full name and an argument by its name are found."""
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(_findings(path))


WORDS = re.compile(rf"\b(?:{'|'.join({name.rpartition('.')[2] for name in MODULES | CALLS | NAMES})})\b")


def _findings(path: Path) -> Iterator[str]:
    benchmark, text = "benchmarks" in path.parts, path.read_text()
    if text.isascii() and not WORDS.search(text):
        return  # parsing it costs a hundred times as much
    for node in ast.walk(ast.parse(text)):
        for name in _names(node):
            for found in _forbidden(name):
                if not (benchmark and found in {"multiprocessing", "ProcessPoolExecutor"}):
                    yield found


@cache
def _forbidden(name: str) -> set[str]:
    """What a name with dots is of MODULES, CALLS and NAMES."""
    parts = name.split(".")
    modules = {".".join(parts[: end + 1]) for end in range(len(parts))} & MODULES
    return modules | ({name} & CALLS) | ({parts[-1]} & NAMES)


def _names(node: ast.AST) -> Iterator[str]:
    """What a part of the source imports, calls or gives by name, with dots."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):
        yield _dotted(node.func)
        yield from (keyword.arg or "" for keyword in node.keywords)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
