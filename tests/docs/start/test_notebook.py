"""docs/operation/notebook.md: its code runs against a coordinator with two daemons, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

import fl_ops
from fl_ops.errors import NotFound
from tests.docs.pages import ROOT
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace

PAGE = (ROOT / "docs/operation/notebook.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
NUMBER = re.compile(r"(?<![\w-])-?\d+\.\d+")
RUN: dict[str, Any] = {
    "task": {"name": "digits", "options": {"client_eval_fraction": 0.2}},
    "round": {"clients_per_round": 2, "min_clients": 2},
    "stop": {"rounds": 10},
    "evaluation": {"clients_every": 5},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """The federation of the page, with a run that has completed."""
    with Workspace(tmp_path_factory.mktemp("notebook")) as workspace:
        coordinator = Coordinator(workspace).serve()
        partition = {"method": "dirichlet", "clients": 2, "seed": 1}
        for index in range(2):
            shard = {"partition": partition, "index": index}
            Daemon(workspace, coordinator, f"edge-{index}", shard=shard, task=RUN["task"]).start()
        coordinator.create("first", **RUN)
        coordinator.completed("first")
        yield coordinator


@pytest.mark.slow
def test_the_code_prints_what_the_page_shows(server: Coordinator) -> None:
    """All blocks in order, in one namespace, with the coordinator's own port."""
    assert len(BLOCKS) == PAGE.count("```python") == 2
    names: dict[str, object] = {"__name__": "page"}
    for code, shown in BLOCKS:
        printed = io.StringIO()
        here = code.replace("127.0.0.1:7071", str(server.settings["admin_listen"]))
        with contextlib.redirect_stdout(printed):
            exec(compile(here, "docs/operation/notebook.md", "exec"), names)  # noqa: S102 - the repository's own page
        assert words(printed.getvalue()) == words(shown)
        assert numbers(printed.getvalue()) == pytest.approx(numbers(shown), abs=0.1)
    lines = BLOCKS[0][0].strip().splitlines()
    assert len([line for line in lines if line and not line.startswith(("import", "from"))]) <= 10


def words(text: str) -> list[str]:
    """The text without fractions, which depend on the processor."""
    return NUMBER.sub("#", text).split()


def numbers(text: str) -> list[float]:
    """The fractions."""
    return [float(found) for found in NUMBER.findall(text)]


@pytest.mark.slow
def test_what_a_run_has(server: Coordinator) -> None:
    """Settings, a watch of an ended run, the newest rounds, and an error as on the command line."""
    with fl_ops.connect(str(server.settings["admin_listen"]), insecure=True) as coordinator:
        run = coordinator.run("first")
        assert (run.state, run.rounds_done, run.settings["task"]["name"]) == ("completed", 10, "digits")
        assert list(run.watch()) == []
        assert [row["round"] for row in run.rounds(2)] == [8, 9]
        assert run.rounds()[-1]["committed"] == run.status.latest.committed.ToDatetime(tzinfo=UTC)
        assert run.model().keys() == run.model(9).keys()
        with pytest.raises(NotFound, match="none"):
            coordinator.run("none")


def test_the_import_is_light() -> None:
    """Neither torch nor grpc, before a connection is made; every public name is there."""
    code = (
        "import sys, fl_ops; "
        "print({'torch', 'grpc', 'google'} & sys.modules.keys(), set(fl_ops.__all__) - {*dir(fl_ops)})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set() set()\n"
    assert all(callable(getattr(fl_ops, name)) for name in fl_ops.__all__)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = fl_ops.conect  # type: ignore[attr-defined]  # a wrong name


@pytest.mark.parametrize("insecure", [True, False])
def test_grpc_before_the_connection(insecure: bool, tmp_path: Path) -> None:
    """With certificates it is an error that says what to do; in plain text it makes no difference."""
    paths = {name: str(tmp_path / name) for name in ("ca", "cert", "key")}
    arguments = "insecure=True" if insecure else f"**{paths}"
    code = f"import grpc, fl_ops; fl_ops.connect('127.0.0.1:1', {arguments}).close()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "before anything imports grpc" in done.stderr) == (int(not insecure), not insecure)
