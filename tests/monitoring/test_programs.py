"""The monitoring programs of the tests: they start, answer and end."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.monitoring.alertmanager import alertmanager
from tests.monitoring.programs import answers, needed
from tests.monitoring.prometheus import Sample, Setup, prometheus
from tests.processes.process import eventually

ROOT = Path(__file__).parents[2]
STARTER = """
import pathlib, time
from tests.monitoring.alertmanager import alertmanager
with alertmanager(pathlib.Path({!r})) as manager:
    print(manager.address, flush=True)
    time.sleep(600)
"""
ALWAYS = {
    "name": "always",
    "rules": [{"record": "one", "expr": "vector(1)"}, {"alert": "Always", "expr": "vector(2) > 1"}],
}


def test_prometheus_answers_queries(tmp_path: Path) -> None:
    """Rules are evaluated, instant and range queries are answered, and an invalid expression is refused."""
    with prometheus(tmp_path, Setup(rules=[ALWAYS], interval="200ms")) as server:
        eventually(server.alerts, "the alert is there")
        assert server.query("one + 1") == [Sample({}, 2.0)]
        assert [alert["state"] for alert in server.alerts()] == ["firing"]
        assert {rule["name"]: rule["health"] for rule in server.rules()} == {"one": "ok", "Always": "ok"}
        now = time.time()
        assert [series.labels for series in server.query_range("one", now - 1, now + 1)] == [{"__name__": "one"}]
        with pytest.raises(AssertionError, match="parse error"):
            server.query("sum(")


@pytest.mark.slow
def test_a_missing_target_is_down(tmp_path: Path) -> None:
    """Prometheus reports a stopped Alertmanager as down, and ends with its block."""
    with ExitStack() as stack:
        manager = stack.enter_context(alertmanager(tmp_path))
        with prometheus(tmp_path, Setup(jobs={"manager": [manager.address]}, interval="200ms")) as server:
            assert server.value('up{job="manager"}') == 1
            stack.close()
            eventually(lambda: server.targets() == {manager.address: "down"}, "the target is down")
            eventually(lambda: server.value('up{job="manager"}') == 0, "the sample is 0")
            assert server.value("nothing_of_this_name") is None
    assert not answers(server.address)


def test_a_program_ends_with_the_tests(tmp_path: Path) -> None:
    """The kill of the starting process closes the program's stdin, and the program ends."""
    needed("prometheus-alertmanager")
    command = [sys.executable, "-c", STARTER.format(str(tmp_path))]
    starter = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    address = starter.stdout.readline().strip()
    assert answers(address)
    starter.kill()
    starter.communicate()
    eventually(lambda: not answers(address), "the program has ended")
