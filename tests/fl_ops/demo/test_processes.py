"""Child processes that end with their parent in every case."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fl_ops.demo.processes import Child, ChildEnded, Processes
from tests.processes.process import eventually

ROOT = Path(__file__).parents[3]
MakeProgram = Callable[[str], str]
WAITS = "import time; print('up', flush=True); time.sleep(1000)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeProgram:
    """Makes a module from its text, which `Processes.start` can run; returns its name."""

    def make(text: str) -> str:
        (tmp_path / "a_program.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
        return "a_program"

    return make


def wait_for(child: Child, text: str) -> None:
    """Until the child has printed it."""

    def printed() -> bool:
        assert text in child.log.read_text() or child.process.is_alive(), child.log.read_text()
        return text in child.log.read_text()

    eventually(printed, f"the child prints {text}")


def test_none_is_left_when_the_block_ends(program: MakeProgram, tmp_path: Path) -> None:
    """Also not a child that ignores SIGTERM."""
    with Processes(tmp_path) as processes:
        child = processes.start("one", program(DEAF), tmp_path / "config.toml")
        wait_for(child, "up")
    assert not child.process.is_alive()


def test_none_is_left_when_the_block_raises(program: MakeProgram, tmp_path: Path) -> None:
    """An error, and Ctrl-C is one, ends the children too."""
    processes = Processes(tmp_path)
    child = processes.start("one", program(WAITS), tmp_path / "config.toml")
    with pytest.raises(KeyboardInterrupt), processes:
        raise KeyboardInterrupt
    assert not child.process.is_alive()


PARENT = """
import sys, time
from pathlib import Path
from fl_ops.demo.processes import Processes

if __name__ == "__main__":
    with Processes(Path(sys.argv[1])) as processes:
        print(processes.start("one", "a_program", Path("x")).process.pid, flush=True)
        time.sleep(1000)
"""


def test_a_child_ends_when_its_parent_is_killed(program: MakeProgram, tmp_path: Path) -> None:
    """SIGKILL lets the parent end no child; the child, which ignores SIGTERM, ends by itself."""
    program(DEAF)
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        eventually(lambda: "up" in (tmp_path / "one.log").read_text(), "the child runs")
        parent.kill()
    eventually(lambda: not psutil.pid_exists(child), "the child has ended")


def test_a_child_gets_its_own_arguments(program: MakeProgram, tmp_path: Path) -> None:
    """The program sees what it would see if it were started by itself."""
    name = program("import sys, time; print(sys.argv[1:], __name__, flush=True); time.sleep(1000)")
    with Processes(tmp_path) as processes:
        wait_for(processes.start("one", name, Path("config.toml")), "['--config', 'config.toml'] __main__")


def test_a_child_that_ended_is_reported_with_its_last_lines(program: MakeProgram, tmp_path: Path) -> None:
    """Name, exit code, log file, and the last lines of the log."""
    with Processes(tmp_path) as processes:
        processes.start(
            "one", program("for n in range(20): print('line', n)\nraise SystemExit(3)"), Path("x")
        ).process.join()
        with pytest.raises(ChildEnded, match=r"one ended with exit code 3 .* its log is .*one\.log") as error:
            processes.check()
    assert error.value.tail[0] == "line 8"
    assert error.value.tail[-1] == "line 19"


def test_running_children_are_no_error(program: MakeProgram, tmp_path: Path) -> None:
    """`check` returns at once, or after `wait_s`."""
    with Processes(tmp_path) as processes:
        processes.start("one", program(WAITS), Path("x"))
        processes.check()
        processes.check(wait_s=0.1)
