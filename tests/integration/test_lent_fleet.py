"""The fleet that tests share: what one test leaves behind does not go on beside the next."""

from __future__ import annotations

from tests.processes.federation import Fleet


def test_a_run_that_a_test_leaves_open_ends_with_the_test(shared_fleet: Fleet) -> None:
    """Also one whose daemons would train for ever."""
    with shared_fleet.lent() as fleet:
        fleet.server.create("forgotten", local={"epochs": None, "steps": 10_000_000})
        cohort = fleet.server.until("forgotten", lambda run: run.cohort, "it draws").cohort
        fleet[cohort[0]].logged("assignment", run="forgotten")
    assert fleet.server.run("forgotten").HasField("ended")
    assert fleet[cohort[0]].logged("cancelled", run="forgotten")["reason"] == "REFUSAL_REASON_ABANDONED"
