"""The benchmark of a simulated round's own work."""

from __future__ import annotations

import json
from time import perf_counter

import pytest
import torch

from benchmarks import host_time
from fl_ops.simulate import reports


@pytest.mark.slow  # test_rounds has a benchmark of rounds that runs whole
def test_the_parts_of_a_round_are_its_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds in lockstep: the parts add up to the time of a client's step, and the table has a row of them."""
    monkeypatch.setitem(vars(reports), "perf_counter", perf_counter)  # put back afterwards
    threads = torch.get_num_threads()
    host_time.main(["--once", "--rounds", "2"])
    torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert sum(found["parts_us"].values()) == pytest.approx(found["us_per_client_step"], abs=0.1)
    assert found["us_per_client_step"] * host_time.COHORT * host_time.STEPS == pytest.approx(
        1e3 * found["ms_per_round"], rel=1e-2
    )
    rows = host_time.table({"this": [found]})
    assert len({row.count("|") for row in rows}) == 1
