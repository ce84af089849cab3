"""`pytest --workers N` runs the tests in N processes, which are forks of the one that has collected them.

Imports and collection are done once and not by each worker, and one forkserver serves all. There can be more workers
than cores, which use the time in which others wait for processes. A worker runs one file after the other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

END_S = 60.0
"""A worker that has not ended after this time is killed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--workers N`."""
    parser.addoption("--workers", type=int, default=0, help="run the tests in so many processes; 0: in this one")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    if count := config.getoption("workers"):
        config.pluginmanager.register(Workers(count))


@dataclass(eq=False)
class Worker:
    """One process that runs tests, as the parent sees it."""

    process: ForkProcess
    connection: Connection
    left: list[pytest.Item]
    """Tests that it has and that have not ended."""


class Workers:
    """The plugin of the parent. It replaces pytest's loop over the tests."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._running: list[Worker] = []
        self._files: list[list[pytest.Item]] = []
        self._given = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Give the files to the workers, in order, and report what they answer."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says so
        self._files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
        _factory(session).getbasetemp()  # each worker makes its own in it
        try:
            while self._started < self._count and (file := self._next()):
                self._start(session, file)
            while self._running:
                ready = wait([worker.connection for worker in self._running])
                for worker in [worker for worker in self._running if worker.connection in ready]:
                    self._hear(session, worker)
        finally:
            self._end()
        return True

    def _next(self) -> list[pytest.Item]:
        """The next file; empty after the last."""
        self._given += 1
        return self._files[self._given - 1] if self._given <= len(self._files) else []

    def _start(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        ours, its = multiprocessing.Pipe()
        self._started += 1
        arguments = session, its, self._files, items, self._started
        process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        process.start()
        its.close()
        self._running.append(Worker(process, ours, list(items)))

    def _hear(self, session: pytest.Session, worker: Worker) -> None:
        """Handle a message: a report of a test, or None if the worker is at the last test that it has; or its end."""
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            return self._bury(session, worker)
        if message is None:
            worker.connection.send(self._given)
            worker.left += self._next()
            return None
        report = session.config.hook.pytest_report_from_serializable(config=session.config, data=message)
        if report.when == "teardown":
            worker.left = [item for item in worker.left if item.nodeid != report.nodeid]
        return _report(session, report)

    def _bury(self, session: pytest.Session, worker: Worker) -> None:
        """A worker has ended. If it had tests left, the first one ended it, and another worker does the others."""
        self._running.remove(worker)
        worker.process.join(END_S)
        if not worker.left:
            return
        dead, *left = worker.left
        if left:
            self._start(session, left)
        text = f"the process of this test ended with code {worker.process.exitcode}"
        _report(session, pytest.TestReport(dead.nodeid, dead.location, {}, "failed", text, "call"))

    def _end(self) -> None:
        """End the workers that are left after an interrupt or `--exitfirst`, and wait for their fixtures' ends."""
        for worker in self._running:
            worker.connection.close()
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGINT)
        for worker in self._running:
            worker.process.join(END_S)
            worker.process.kill()


def _report(session: pytest.Session, report: pytest.TestReport) -> None:
    session.config.hook.pytest_runtest_logreport(report=report)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


class _Reports:
    """The plugin of a worker: sends its reports to the parent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report, without the output of a test that passed."""
        if report.passed:
            report.sections = []
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)


def _work(
    session: pytest.Session,
    parent: Connection,
    files: list[list[pytest.Item]],
    items: list[pytest.Item],
    worker: int,
) -> None:
    """Run tests in the worker. Fixtures of a session live from its first test to its last."""
    _settle(session, parent, worker)
    with ExitStack() as last:
        last.enter_context(suppress(KeyboardInterrupt, ConnectionError, EOFError))  # the parent has ended the run
        last.callback(session._setupstate.teardown_exact, None)
        while items:
            item, *items = items
            if not items:
                parent.send(None)
                items = files[number] if (number := parent.recv()) < len(files) else []
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=items[0] if items else None)


def _settle(session: pytest.Session, parent: Connection, worker: int) -> None:
    """Make a fork of the parent a process of its own: folder of temporary files, output, reports."""
    config = session.config
    factory = _factory(session)
    factory._basetemp = factory.getbasetemp() / f"worker{worker}"
    factory._basetemp.mkdir(mode=0o700)
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    assert isinstance(terminal, TerminalReporter)
    terminal._tw._file = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    config.pluginmanager.register(_Reports(config, parent))
    # The parent's forkserver, which only the parent could wait for.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def _factory(session: pytest.Session) -> Any:
    return session.config._tmp_path_factory  # type: ignore[attr-defined]


def common_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of temporary files that all workers have in common."""
    own = factory.getbasetemp()
    return own.parent if multiprocessing.parent_process() else own
