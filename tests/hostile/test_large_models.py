"""An operator whose task options size a model, against the memory of a real coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_ops.errors import UsageError
from tests.fl_tasks.built_in.plays import write_play
from tests.hostile.federation import Memory
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace

MODEL_MIB, MODELS_MIB, OTHER_MIB = 64, 128, 48
"""Limits of one model and of all; what else the coordinator may take for the calls."""
TOO_LARGE = [*[100_000] * 12, 10**6, 10**9, 2**40]
"""Ranks of adapters. The matrices of the first are built up to 38 MiB before the limit refuses the next one."""
FITS = 2_400


def create(server: Coordinator, name: str, rank: int) -> None:
    """Create a run whose adapters have this rank."""
    server.create(name, task={"name": "shakespeare", "options": {"lora": rank, "least_characters": 500}})


@pytest.mark.slow
def test_options_that_size_a_model_keep_the_memory_in_its_bound(tmp_path: Path) -> None:
    """Refused models leave nothing behind, and accepted ones stay within the limit of all, after a restart too."""
    with Workspace(tmp_path) as workspace:
        settings = {
            "limits": {"max_model_mib": MODEL_MIB, "max_models_mib": MODELS_MIB},
            "task_options": {"shakespeare": {"data_root": write_play(tmp_path / "data")}},
        }
        server = Coordinator(workspace, "server", settings).serve()
        create(server, "small", 8)  # it imports peft, which takes memory of its own
        memory = Memory(server.pid)
        before = memory.now()
        memory.forget_peak()
        for number, rank in enumerate(TOO_LARGE):
            with pytest.raises(UsageError, match=r"limits\.max_model_mib"):
                create(server, f"refused-{number}", rank)
        assert memory.peak() < before + MODEL_MIB + OTHER_MIB
        create(server, "first", FITS)
        create(server, "second", FITS)
        for number in range(5):
            with pytest.raises(UsageError, match=r"limits\.max_models_mib"):
                create(server, f"more-{number}", FITS)
        bound = before + MODELS_MIB + MODEL_MIB + OTHER_MIB
        assert memory.peak() < bound
        server.kill()
        assert Memory(server.serve().pid).peak() < bound
        assert {server.run(name).rounds_done for name in ("small", "first", "second")} == {0}
