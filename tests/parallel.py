"""Runs the collected tests in forked processes: `pytest --workers 4`.

The process that forks the others imports and collects the tests once, so a further process costs next to nothing. Each
process gets a file at a time, in the order of collection, and makes the fixtures of a session for itself. If a process
dies, the test that it was running has failed, and a new process goes on with the file.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

FORK = multiprocessing.get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--workers`. Without it, pytest's own process runs the tests."""
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N forked processes")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forked processes, if they are asked for. None: pytest's own loop runs the tests."""
    options = session.config.option
    if not options.workers or options.collectonly or session.testsfailed:
        return None
    pool = _Pool(session)
    try:
        pool.run(options.workers)
    finally:
        pool.close()
    return True


@dataclass
class _Worker:
    """A forked process, and the tests of its file that have not ended."""

    process: BaseProcess
    file: deque[pytest.Item]


class _Pool:
    """The forked processes, as the process that forked them sees them."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._hook = session.config.hook
        self._places = {item: place for place, item in enumerate(session.items)}
        self._files = deque(deque(items) for _, items in groupby(session.items, lambda item: item.path))
        self._workers: dict[Connection, _Worker] = {}
        self._forked = 0
        _temporary_folders(session).getbasetemp()  # made here, so that it is the same for all

    def run(self, count: int) -> None:
        """Run all tests in `count` processes. Stops as pytest's own loop does."""
        for _ in range(min(count, len(self._files))):
            self._fork()
        while self._workers:
            for connection in wait(list(self._workers)):
                assert isinstance(connection, Connection)
                reports = _received(connection)
                if reports is None:
                    self._ended(connection)
                else:
                    self._report(connection, reports)
            if self._session.shouldfail:
                raise self._session.Failed(self._session.shouldfail)
            if self._session.shouldstop:
                raise self._session.Interrupted(self._session.shouldstop)

    def close(self) -> None:
        """Wait for the processes, which end after their present test when nothing is connected to them."""
        for connection in self._workers:
            connection.close()
        for worker in self._workers.values():
            worker.process.join()

    def _fork(self) -> None:
        ours, its = FORK.Pipe()
        arguments = self._session, self._forked, its, [ours, *self._workers]
        process = FORK.Process(target=_work, args=arguments)
        process.start()
        its.close()
        self._forked += 1
        self._workers[ours] = _Worker(process, deque())
        self._give_file(ours)

    def _give_file(self, connection: Connection) -> None:
        """Give it the next file; if there is none, it ends."""
        file = self._files.popleft() if self._files else deque()
        self._workers[connection].file = file
        connection.send([self._places[item] for item in file])

    def _report(self, connection: Connection, reports: list[dict[str, Any]]) -> None:
        """Pass on the reports of a test, which has ended."""
        file = self._workers[connection].file
        item = file.popleft()
        for data in reports:
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=data)
            self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if not file:
            self._give_file(connection)

    def _ended(self, connection: Connection) -> None:
        """Report a process that ended too early as the failure of its test, and let a new one go on with its file."""
        worker = self._workers.pop(connection)
        connection.close()
        worker.process.join()
        code = worker.process.exitcode
        if worker.file:
            item = worker.file.popleft()
            message = f"the process that ran this test ended with exit code {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
            self._hook.pytest_runtest_logreport(report=report)
            if worker.file:
                self._files.appendleft(worker.file)
            self._fork()
        elif code:
            raise RuntimeError(f"a process that ran tests failed at its end with exit code {code}, see its output")


def _received(connection: Connection) -> Any:
    """The other end's message; None if it has closed the connection."""
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return None


def _temporary_folders(session: pytest.Session) -> Any:
    return session.config._tmp_path_factory  # type: ignore[attr-defined]  # there is no other way


class _OtherFile(pytest.Item):
    """Stands for a test of a file that is not known yet: of all fixtures, only those of the session stay."""

    def runtest(self) -> None:
        raise NotImplementedError


class _Reports:
    """What a forked process has instead of pytest's reporter: the reports of its present test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tw = config.get_terminal_writer()
        """pytest asks the reporter for it; pytest-timeout writes the stacks of a test that hangs."""
        self.serialized: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self.serialized.append(hook.pytest_report_to_serializable(config=self._config, report=report))


def _work(session: pytest.Session, number: int, parent: Connection, others: list[Connection]) -> None:
    """Run the files that the parent gives, in a forked process."""
    for connection in others:
        connection.close()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a test may have children
    random.seed()
    config, folders = session.config, _temporary_folders(session)
    folders._basetemp = folders.getbasetemp() / f"worker-{number}"
    folders._basetemp.mkdir(mode=0o700)
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    capture.start_global_capturing()  # into files of its own
    reports = _Reports(config)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(reports, "terminalreporter")
    other_file = _OtherFile.from_parent(session, name="other file")
    try:
        while places := _received(parent):
            for place, following in zip(places, [*places[1:], None], strict=True):
                after = other_file if following is None else session.items[following]
                config.hook.pytest_runtest_protocol(item=session.items[place], nextitem=after)
                parent.send(reports.serialized)
                reports.serialized = []
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # nobody wants the rest
    finally:
        session._setupstate.teardown_exact(None)
        capture.stop_global_capturing()
