"""Settings and fixtures of all tests: one torch thread, no deadlines, a small model, processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from itertools import zip_longest
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import settings

from tests import emulated_stores, postgres_server, s3_server
from tests.emulated_stores import StoreServer
from tests.postgres_server import PostgresServer
from tests.processes import forks
from tests.processes.certificates import Pki
from tests.processes.process import OPEN_WORKSPACES, Workspace
from tests.s3_server import S3Server

if TYPE_CHECKING:
    import torch
    from torch import nn

TESTS = Path(__file__).parent

# structlog's own default renders each traceback with rich and pygments, which takes a second of the processor's time.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.set_exc_info,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)
LOGGING = structlog.get_config()
"""A test of log set-up leaves another one behind, which is not for the tests of the next file."""

# jsonschema would compile a grammar of IRIs for two seconds, for a format that is checked nowhere.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None: it is not installed

# A suite started in the background ignores SIGINT, and its processes would inherit that. Processes under test need
# the default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure.
settings.register_profile("all", settings(), deadline=None)
settings.register_profile("short", settings(), deadline=None, max_examples=25)


WAITING = ("deterministic", "docs", "hostile", "integration", "chaos", "monitoring", "images", "power", "soak",
           "fl_ops", "browser")  # fmt: skip
"""Folders with long tests, most of which wait for processes; the folder with the longest of all is first."""


TEMPORARY = "IMPETUS_TESTS_TMPDIR"
"""Environment variable of all processes of a run of the tests: the folder for temporary files of this machine."""


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples a property gets that names no number: fewer without the slow tests.

    Make the folder for temporary files, of which killed programs leave many. It is removed last of all, and the folders
    of failed tests are elsewhere.
    """
    settings.load_profile("short" if config.getoption("markexpr") == "not slow" else "all")
    if TEMPORARY not in os.environ:
        os.environ[TEMPORARY] = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
        Path(tempfile.tempdir).chmod(0o711)  # another user runs PostgreSQL in a folder of its own there
        Finalize(None, _end, (tempfile.tempdir,), exitpriority=-1000)


def _end(folder: str) -> None:
    """Last of all, when no program runs any more."""
    forks.end()
    shutil.rmtree(folder, ignore_errors=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the forkserver, before a test can start another one. In a process that runs tests: load torch, too.

    A process that only controls others has no use for it, and they wait for its start.
    """
    forks.start()
    if session.config.getoption("numprocesses", None):
        return
    import torch  # noqa: PLC0415 - see above
    import typer.testing  # noqa: PLC0415

    from tests import statements  # noqa: PLC0415 - not in a process that only controls others

    statements.share()
    # typer would read the signatures of all sixty commands again for each command line. A process has one.
    shared = functools.cache(typer.main.get_command)
    typer.main.get_command = typer.testing._get_command = shared  # type: ignore[attr-defined]
    # Bits are the same for a fixed number of threads only, and the test workers share the cores.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the million objects of all test files out of garbage collections, each of which would search them."""
    gc.disable()
    try:
        return (yield)
    finally:
        _propagate_logs()
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 10, 50)  # as the coordinator's


def _propagate_logs() -> None:
    """Let torch's loggers pass their lines on to the root logger.

    Otherwise pytest adds six handlers to each of these forty loggers, and removes them, for every test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests that wait, and put a file of others after each of their files, which uses the time."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    folders = {path: path.relative_to(TESTS).parts[0] for path in files}
    waiting = sorted((path for path in files if folders[path] in WAITING), key=lambda path: folders[path] != WAITING[0])
    others = [path for path in files if folders[path] not in WAITING]
    pairs = zip_longest(waiting, others)
    items[:] = [item for pair in pairs for path in pair if path is not None for item in files[path]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A program that a test runs in its own process sets this variable; later tests start Pythons that need `tests`."""
    os.environ.pop("PYTHONSAFEPATH", None)


LOADED = pytest.StashKey[int]()
"""Number of loaded modules when what stays was last kept out of garbage collections."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """After each file, and after a test that loaded a library, keep what stays out of garbage collections too.

    Log lines have the form of `LOGGING` again.

    The product collects garbage after each run that it refuses. With Lightning loaded that took a second each time.
    """
    try:
        return (yield)
    finally:
        known, loaded = item.config.stash.get(LOADED, 0), len(sys.modules)
        if nextitem is None or nextitem.path != item.path or loaded > known + 100:
            item.config.stash[LOADED] = loaded
            structlog.configure(**LOGGING)
            gc.collect()
            gc.freeze()


@pytest.fixture
def tiny_model() -> nn.Module:
    """[n, 4] -> [n, 2], the same values every time; with float and integer buffers (BatchNorm)."""
    import torch  # noqa: PLC0415 - not in a process that only controls others
    from torch import nn  # noqa: PLC0415

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of a worker. Skips the test if none is installed."""
    with postgres_server.running() as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server that checks signatures."""
    with s3_server.running() as server:
        yield server


@pytest.fixture(scope="session")
def az() -> Iterator[StoreServer]:
    """A server with Azure's protocol that checks keys."""
    with emulated_stores.azure() as server:
        yield server


@pytest.fixture(scope="session")
def gs() -> Iterator[StoreServer]:
    """A server with Google's protocol that lets everybody in."""
    with emulated_stores.google() as server:
        yield server


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A folder for the processes of one test."""
    with Workspace(tmp_path) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def module_workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A folder for the processes of all tests of one file."""
    with Workspace(tmp_path_factory.mktemp("module")) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def pki(module_workspace: Workspace) -> Pki:
    """The authority of one file's coordinators."""
    return Pki(module_workspace.folder / "pki")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the last log lines of every process to the report of a failed test."""
    report = yield
    if report.failed:
        for process in (process for workspace in OPEN_WORKSPACES for process in workspace.processes):
            report.sections.append((f"{process.name}, exit code {process.exit_code}", process.tail()))
    return report


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """A GPU, or what stands for one on a machine without."""
    import torch  # noqa: PLC0415 - most tests need no torch

    from tests import stand_in_gpu  # noqa: PLC0415

    with contextlib.nullcontext() if torch.cuda.is_available() else stand_in_gpu.in_use():
        yield stand_in_gpu.GPU
