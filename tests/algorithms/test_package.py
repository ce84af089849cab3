"""The package as a whole: its example runs, its names are listed, and it needs no transport."""

import doctest
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import algorithms

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc" or name.startswith(("grpc.", "google.protobuf")):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import algorithms
algorithms.build("fedcm")
ours = ("protos", "tasks", "fl_server", "fl_client", "fl_ops")
print([name for name in sys.modules if name.split(".")[0] in ours])
"""


def test_example_of_the_package_runs():
    """The docstring's round of FedCM gives the numbers that it prints."""
    results = doctest.testmod(algorithms)
    assert results.attempted > 0
    assert results.failed == 0


def test_public_names_are_exactly_the_listed_ones():
    """`__all__` has every public name but submodules, in order, and nothing else."""
    public = {name for name, value in vars(algorithms).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert public == set(algorithms.__all__)
    assert len(algorithms.__all__) == len(set(algorithms.__all__))


def test_package_needs_no_transport():
    """With grpc and protobuf out of reach algorithms are built, and no other package of ours is loaded."""
    root = Path(algorithms.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", BLOCKED], cwd=root, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
