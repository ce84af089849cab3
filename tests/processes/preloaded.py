"""The modules that forked programs find imported. A forkserver imports this module, and nothing else does."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

# A quarter of a million objects, none of which is garbage, would be searched many times, here and in each program.
gc.disable()
# The first one sets the oldest TLS version, as a program does it, before grpc is imported.
for name in ("tests.processes.forks", "fl_server.app", "fl_client.app", "fl_ops.commands.cli", "fl_ops.admin.client"):
    importlib.import_module(name)
# What programs import late: the database's driver, and what reads packages' data and names of hosts.
for name in ("sqlalchemy.dialects.sqlite.aiosqlite", "numpy.ctypeslib", "importlib.readers", "encodings.idna"):
    importlib.import_module(name)
new_model, nn = importlib.import_module("fl_tasks.new_model").new_model, importlib.import_module("torch.nn")
for place in importlib.import_module("fl_ops.commands.places").COMMANDS.values():
    importlib.import_module(f"fl_ops.commands.{place.module}")
new_model(SimpleNamespace(model=lambda: nn.Linear(2, 2)), max_bytes=1 << 20)
forks = importlib.import_module("tests.processes.forks")
EARLY = [name for name in forks.HEAVY if name in sys.modules]
"""Those of them that a program imports at its start, or when it makes a model of limited size: none."""
forks.import_heavy()
# The statements that make a ledger's tables, and its migrations.
with TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as folder:  # a short run may have ended meanwhile
    importlib.import_module("fl_server.store.database.store").open_sqlite(Path(folder) / "ledger.sqlite").close()
# Programs tell these versions at their start, and read the packages' data for them.
for name in ("impetus-fl", "torch", "grpcio"):
    importlib.import_module("fl_common.metrics").package_version(name)
gc.freeze()
gc.enable()
