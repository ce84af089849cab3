"""torchvision with a torch that does not match its compiled operators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fl_tasks import TaskError
from fl_tasks.torchvision_compat import SCHEMAS, declare_missing_operators, import_torchvision


def test_torchvision_is_imported() -> None:
    """The module that comes back is torchvision, its data sets ready; a second call gives the same module."""
    torchvision = import_torchvision()
    assert torchvision is import_torchvision() is sys.modules["torchvision"]
    assert torchvision.datasets.CIFAR10.train_list


def test_declaring_twice_changes_nothing() -> None:
    """After an import every operator of the table is declared."""
    import_torchvision()
    assert declare_missing_operators() == []
    assert all(hasattr(torch.ops.torchvision, name.split("::")[1]) for name in SCHEMAS)


FAKE = """
import torch
torch.library.register_fake("torchvision::nms", lambda *args: None)
torch.library.register_fake("torchvision::qnms", lambda *args: None)
from . import part
print("whole")
"""


CASES = {
    "no-binary": (FAKE, "whole\n2\n"),
    "broken-binary": (FAKE, "whole\n2\n"),
    "binary": (FAKE, "whole\n0\n"),
    "stable-binary": (FAKE, "whole\n0\n"),
    "another-error": ("raise RuntimeError('a broken disk')", "RuntimeError('a broken disk')\n"),
}
"""Source of a package torchvision, and the output of importing it: its own, and the number of declared operators."""

PROGRAM = """
import os, sys, torch
def load(path):
    if "broken" in path:
        raise OSError("undefined symbol")
    torch.library.define("torchvision::nms", "() -> ()")
    torch.library.define("torchvision::qnms", "() -> ()")
torch.ops.load_library = load
for folder in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    sys.path.insert(0, folder)
    from fl_tasks import torchvision_compat
    try:
        torchvision_compat.import_torchvision()
        print(len(torchvision_compat.SCHEMAS) if "(Tensor" in str(torch.ops.torchvision.nms.default._schema) else 0)
    except Exception as error:
        print(repr(error))
    sys.exit()
"""


@pytest.mark.slow
def test_operators_are_declared_only_when_missing(tmp_path: Path) -> None:
    """A package that describes undeclared operators imports; a binary that declares them is first; errors pass."""
    for name, (source, _) in CASES.items():
        (tmp_path / name / "torchvision").mkdir(parents=True)
        (tmp_path / name / "torchvision" / "part.py").touch()
        (tmp_path / name / "torchvision" / "__init__.py").write_text(source)
        if "binary" in name and name != "no-binary":
            binary = "_C_stable.so" if name == "stable-binary" else "_C.so"
            (tmp_path / name / "torchvision" / binary).touch()
    program = [sys.executable, "-c", PROGRAM, *(str(tmp_path / name) for name in CASES)]
    run = subprocess.run(program, capture_output=True, text=True, check=True)
    assert run.stdout == "".join(expected for _, expected in CASES.values())


def test_without_torchvision_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(TaskError, match="pip install torchvision"):
        import_torchvision()


@pytest.mark.slow
def test_importing_the_tasks_does_not_import_torchvision() -> None:
    """Making a task that reads files through torchvision costs nothing until it reads them."""
    program = "import sys, fl_tasks; fl_tasks.load_task('cifar10').model(); print('torchvision' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["from torchvision.transforms import v2", "import peft"])
def test_a_task_of_a_user_imports_it_directly_or_through_a_library(tmp_path: Path, line: str) -> None:
    """A task whose module imports torchvision, or peft and so transformers, loads with any build of torch."""
    text = f"{line}\nfrom fl_tasks.built_in.digits import Digits\n\n\nclass Own(Digits):\n    pass\n"
    (tmp_path / "own_task.py").write_text(text)
    program = "import fl_tasks; print(len(fl_tasks.load_task('own_task:Own').train_labels()))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "1437\n"), run.stderr


@pytest.mark.slow
def test_a_failed_import_before_does_no_harm(tmp_path: Path) -> None:
    """A user's code may have tried the import first: what that attempt left in sys.modules is not used."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "part.py").write_text("from torchvision import early\n")
    (package / "__init__.py").write_text(f"from . import extension\nearly = 1{FAKE}")
    (package / "extension.py").touch()
    program = (
        "import contextlib\n"
        "with contextlib.suppress(RuntimeError):\n    import torchvision\n"
        "from fl_tasks.torchvision_compat import import_torchvision\n"
        "module = import_torchvision()\nprint(module.part.early, module.extension.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "whole\n1 torchvision.extension\n"), run.stderr
