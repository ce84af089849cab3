"""torchvision beside a torch that its compiled operators may not fit."""

import subprocess
import sys

import pytest
import torch

from tasks import TaskError
from tasks.torchvision_compat import SCHEMAS, declare_missing_operators, import_torchvision


def test_torchvision_is_imported():
    """The module that comes back is torchvision, its data sets ready; asking again gives the same module."""
    torchvision = import_torchvision()
    assert torchvision is import_torchvision() is sys.modules["torchvision"]
    assert torchvision.datasets.CIFAR10.train_list


def test_declaring_twice_changes_nothing():
    """After an import every operator of the table is declared, whoever did it."""
    import_torchvision()
    assert declare_missing_operators() == []
    assert all(hasattr(torch.ops.torchvision, name.split("::")[1]) for name in SCHEMAS)


OWN = """
import torch
torch.library.define("torchvision::nms", "() -> ()")
torch.library.define("torchvision::qnms", "() -> ()")
"""

FAKE = """
import torch
torch.library.register_fake("torchvision::nms", lambda *args: None)
torch.library.register_fake("torchvision::qnms", lambda *args: None)
from . import part
print("whole")
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (FAKE, "whole\n"),
        (OWN + FAKE, "whole\n"),
        ("raise RuntimeError('a broken disk')", "RuntimeError('a broken disk')\n"),
    ],
    ids=["no operators", "operators of its own", "another error"],
)
def test_operators_are_declared_only_when_missing(tmp_path, source, expected):
    """A package that describes undeclared operators imports; one that declares its own is first; other errors pass."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "part.py").touch()
    (tmp_path / "torchvision" / "__init__.py").write_text(source)
    program = f"""
import sys
from tasks.torchvision_compat import import_torchvision
sys.path.insert(0, {str(tmp_path)!r})
try:
    import_torchvision()
except Exception as error:
    print(repr(error))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert expected == run.stdout


def test_a_machine_without_torchvision_is_told_to_install_it(monkeypatch):
    """The message has the command."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(TaskError, match="pip install torchvision"):
        import_torchvision()


def test_importing_the_tasks_does_not_import_torchvision():
    """Making a task that reads files through torchvision costs nothing until it reads them."""
    program = "import sys, tasks; tasks.load_task('cifar10').model(); print('torchvision' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
