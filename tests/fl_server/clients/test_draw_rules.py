"""The table of reasons why a run does not draw a client, and everything that reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fl_ops.render.tables import client_details
from fl_server.clients.draw_rules import (
    RULES,
    Candidate,
    Requirements,
    Scope,
    Selection,
    able,
    rule_for,
)
from fl_server.run.eligible import described, explained
from fl_server.run.status import why_waiting
from fl_server.store.records import ClientRecord
from fl_web.facts.client import facts
from fl_web.rendering import rendered
from protos.fl.v1 import admin_pb2 as admin
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

ROOT = Path(__file__).parents[3]
TASK = {"name": "digits", "version": "1", "source": "sha256:aa", "frozen": "blake3:ff", "encodings": "bf16"}
METHOD = {"name": "mine", "version": "1", "source": "sha256:bb"}
SELECTION = Selection(Requirements(TASK, {"site": "north"}, METHOD, {"version": "0.2"}), "r")
RECORD = ClientRecord(
    "edge-1", 0.0, 0.0, labels={"site": "north"}, tasks=[TASK], methods=[METHOD], software="impetus 0.2.1"
)
ABLE = Candidate(RECORD, True, pb.Availability(may_train=True), 1.0)


def _task(**changes: str) -> Candidate:
    return _record(tasks=[{**TASK, **changes}])


def _record(**changes: Any) -> Candidate:
    return ABLE._replace(record=replace(RECORD, **changes))


OF_THE_CLIENT: Mapping[str, Candidate] = {
    "task": _task(name="other"),
    "labels": _record(labels={"site": "south"}),
    "version": _record(software="impetus 0.1.9"),
    "task_code": _task(source="sha256:cc"),
    "frozen": _task(frozen="blake3:00"),
    "encodings": _task(encodings="int8"),
    "method": _record(methods=[]),
    "method_code": _record(methods=[{**METHOD, "version": "0"}]),
    "banned": _record(banned=True),
    "draining": _record(draining=True),
    "lost": ABLE._replace(present=False),
    "unavailable": ABLE._replace(availability=pb.Availability(detail="on battery")),
}
"""A client that is not drawn for this reason alone."""
REASONS = [rule.reason for rule in RULES]


def _case(reason: str) -> tuple[Selection, Candidate]:
    if (client := OF_THE_CLIENT.get(reason)) is not None:
        return SELECTION, client
    return replace(SELECTION, kept_out={reason: {"edge-1": "for its details"}}), ABLE


def test_a_client_without_a_reason_is_drawn() -> None:
    """It has task, labels and method, is here, and may train."""
    assert rule_for(SELECTION, ABLE) is None
    assert able(SELECTION, ABLE)


@pytest.mark.parametrize(
    ("software", "drawn"),
    [
        ("impetus 0.2.0", True), ("impetus 0.2", True), ("impetus 0.10.0", True), ("impetus 1.0.0rc1", True),
        ("impetus 0.1.99", False), ("impetus unpackaged", False), ("other 9.9", False), ("", False),
    ],
)  # fmt: skip
def test_the_version_that_a_run_requires(software: str, drawn: bool) -> None:
    """Numbers are compared, not texts; a version that cannot be read is too old."""
    client = _record(software=software)
    assert able(SELECTION, client) is drawn
    anything = replace(SELECTION, requires=SELECTION.requires._replace(software={}))
    assert able(anything, client)


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_has_a_predicate_a_remedy_and_a_sentence_everywhere(reason: str) -> None:
    """Drawing leaves the client out; the waiting reason, the terminal and the page say why, and what to do."""
    selection, client = _case(reason)
    rule = rule_for(selection, client)
    assert rule is not None
    assert rule.reason == reason
    assert able(selection, client) == (rule.scope is not Scope.CLIENT)
    told = explained(rule, selection, client)
    for text in (*told, described(rule, selection, [client])):
        assert text
        assert not re.search(r"[{}]", text), text
    assert told.remedy in described(rule, selection, [client])
    answer = admin.GetClientResponse(not_drawn=[admin.NotDrawn(run_id="r", **told._asdict())])
    console = Console(width=500)
    with console.capture() as shown:
        console.print(client_details(answer))
    page = rendered("client/_facts.html", {"facts": facts(answer), "client": answer.client})
    for text in (shown.get(), page.replace("&#39;", "'")):
        assert f"{told.why}; {told.remedy}" in text


def test_the_contract_lists_the_reasons() -> None:
    """In the order of the table."""
    message = (ROOT / "protos/fl/v1/admin.proto").read_text().partition("message NotDrawn {")[2].partition("}")[0]
    assert re.findall(r'"(\w+)"', message) == REASONS


async def test_an_operator_asks_why_a_client_is_not_drawn(tmp_path: Path) -> None:
    """The answer is the one of the run that waits for it; a client that may be drawn, and an ended run, have none."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        await Device("b").connect(world)
        await world.operators.drain("b", "repair", False, "admin")
        await world.fleet.records.write(replace(world.fleet.records.get("a"), labels={"site": "south"}), None)
        run = await world.create(round={"clients_per_round": 1}, labels={"site": "north"})
        await until(lambda: run.status == "waiting", "it waits")
        why = {client: run.eligible.why_not(run.state, client) for client in "ab"}
        assert [found and found.reason for found in why.values()] == ["labels", "labels"]
        world.fleet.eligibility.set_availability("a", pb.Availability(detail="on battery"))
        await world.fleet.records.write(replace(world.fleet.records.get("a"), labels={"site": "north"}), None)
        found = run.eligible.why_not(run.state, "a")
        assert found is not None
        assert (found.reason, found.why) == ("unavailable", "reports that it may not train: on battery")
        assert f"first a: on battery; {found.remedy}" in why_waiting(run.context, run)
