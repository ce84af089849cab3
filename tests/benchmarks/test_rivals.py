"""The benchmark beside other systems: its measure, what it reads of FLARE's log, and its table."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.rivals.__main__ import main, table
from benchmarks.rivals.contest import Case, Failed, Measured, Place, Running, cpu_at, measure
from benchmarks.rivals.flare import round_ends
from benchmarks.rivals.impetus import start

LOG = """2026-11-28 02:31:32,624 - FedAvg - INFO - [identity=rivals] - 
--------------------------------------------------------------------------------
                                Round 0 started.                                
--------------------------------------------------------------------------------

2026-11-28 02:31:36,641 - FedAvg - INFO - [identity=rivals, peer=site-0] - 
--------------------------------------------------------------------------------
                                Round 1 started.                                
--------------------------------------------------------------------------------
2026-11-28 02:31:36,700 - FedAvg - INFO - Aggregated 2/2 results
2026-11-28 02:31:39,661 - FedAvg - INFO - [identity=rivals, peer=site-0] - 
--------------------------------------------------------------------------------
                                Round 2 started.                                
"""  # noqa: W291 - as FLARE writes it


def test_a_round_of_flare_ends_where_the_next_one_starts(tmp_path: Path) -> None:
    """The start of the first round is no end of a round."""
    log = tmp_path / "server.log"
    log.write_text(LOG)
    first, second = round_ends(log)
    assert second - first == pytest.approx(3.02)


def test_processor_time_is_read_between_samples() -> None:
    """A moment outside of the samples has the value of the nearest one."""
    samples = [(10.0, 1.0), (12.0, 3.0)]
    assert [cpu_at(samples, moment) for moment in (9, 10, 11.5, 12, 13)] == [1.0, 1.0, 2.5, 3.0, 3.0]


def test_all_systems_are_measured_in_the_same_way(tmp_path: Path) -> None:
    """A server that uses processor time: a round is from end to end, and the first is not counted."""
    case, began = Case(1, 1, 1, rounds=2, limit_s=60.0), time.time()

    def spin(_case: Case, place: Place) -> Running:
        server = place.processes.run("server", [sys.executable, "-c", "while True: pass"])
        return Running(server, lambda: [began, began + 0.3, began + 0.8] if time.time() > began + 1 else [], server.log)

    found = measure(spin, case, tmp_path, tmp_path)
    assert found.round_s == [0.3, 0.5]
    assert found.server_cpu_s > 0.0
    assert found.server_peak_mb > 1.0


def test_a_server_that_ends_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    """Not a wait until the limit."""

    def end(_case: Case, place: Place) -> Running:
        server = place.processes.run("server", [sys.executable, "-c", "print('no such port')"])
        server.process.wait()
        return Running(server, list, server.log)

    with pytest.raises(Failed, match="no such port"):
        measure(end, Case(1, 1, 1, rounds=1, limit_s=60.0), tmp_path, tmp_path)


@pytest.mark.slow
def test_this_system_does_the_work(tmp_path: Path) -> None:
    """Two daemons with mTLS, two measured rounds."""
    found = measure(start, Case(2, 1000, 3, rounds=2, limit_s=120.0), tmp_path, tmp_path)
    assert len(found.round_s) == 2
    assert found.server_cpu_s > 0


def test_the_table_has_medians_and_the_range() -> None:
    """Of the runs of one system."""
    runs = {"flare": [Measured([], seconds, 1.0, 1500.0) for seconds in (7.0, 9.0, 8.0)]}
    assert table(runs)[-1] == "| NVIDIA FLARE 2.9.0, mTLS | 8.00 s (7.00 to 9.00) | 1.00 s | 1,500 MB |"


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is installed."""
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "expected 1 or more" in capsys.readouterr().err
