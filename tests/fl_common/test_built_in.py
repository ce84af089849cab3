"""The names of what is built in are those of the code, and they need no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import algorithms
import fl_tasks
from fl_common import built_in
from fl_tasks.partitioning import spec
from fl_tasks.partitioning.partition import SPLITS


def test_each_list_is_that_of_the_table_with_the_code() -> None:
    """In the same order where it is shown."""
    assert built_in.METHODS == algorithms.names()
    assert built_in.REDUCERS == algorithms.BUILT_IN_REDUCERS
    assert built_in.TASKS == tuple(fl_tasks.BUILT_IN)
    assert get_args(built_in.PartitionMethod) == get_args(spec.Method) == tuple(spec.OPTIONS)
    assert tuple(SPLITS) == get_args(spec.Method)


def test_names_need_no_torch() -> None:
    """A shell that completes a word, `fl --help` and a run's file do not wait for it."""
    modules = (
        "fl_common.built_in, fl_ops.commands.completion, fl_ops.commands.local.partition, fl_server.run_settings.config"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=120).returncode == 0
