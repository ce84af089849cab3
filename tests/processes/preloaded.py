"""The modules that forked programs find imported. A forkserver imports this module, and nothing else does."""

from __future__ import annotations

import gc
import importlib

# A quarter of a million objects, none of which is garbage, would be searched many times, here and in each program.
gc.disable()
# The first one sets the oldest TLS version, as a program does it, before grpc is imported.
for name in ("tests.processes.forks", "fl_server.app", "fl_client.app", "fl_ops.commands.cli", "fl_ops.admin.client"):
    importlib.import_module(name)
# What programs import late: the database's driver, and what reads packages' data and names of hosts.
for name in ("sqlalchemy.dialects.sqlite.aiosqlite", "numpy.ctypeslib", "importlib.readers", "encodings.idna"):
    importlib.import_module(name)
for place in importlib.import_module("fl_ops.commands.places").COMMANDS.values():
    importlib.import_module(f"fl_ops.commands.{place.module}")
gc.freeze()
gc.enable()
