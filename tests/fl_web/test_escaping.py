"""Texts of other machines never become markup."""

from __future__ import annotations

from typing import Any

import pytest

from fl_web.facts import client as client_facts
from fl_web.facts import run as run_facts
from fl_web.facts.words import CLIENT_MARKS, CLIENT_STATES, RUN_STATES, known
from fl_web.rendering import environment, rendered, spark
from fl_web.views.clients import CLIENT
from fl_web.views.view import Params
from protos.fl.v1 import admin_pb2 as pb

EVIL = """"><script>alert(1)</script><img src=x onerror='a'>"""


def client() -> pb.ClientStatus:
    """A client whose every text is hostile."""
    status = pb.ClientStatus(
        client_id=EVIL, labels={EVIL: EVIL}, software=EVIL, note=EVIL, run_id=EVIL, policy_refusals={EVIL: EVIL}
    )
    status.device.kind = status.device.name = EVIL
    status.availability.detail = EVIL
    status.tasks.add(name=EVIL).fingerprint.version = EVIL
    status.quarantine.reason = EVIL
    status.attention.append(in_need().attention)
    return status


def in_need() -> pb.ClientInNeed:
    """A client that needs attention; backticks make a text code."""
    return pb.ClientInNeed(client_id=EVIL, attention=pb.Attention(why=EVIL, remedy=f"`{EVIL}` {EVIL}"))


def member() -> pb.CohortMember:
    """A client of a round."""
    return pb.CohortMember(client_id=EVIL, phase=EVIL, detail=EVIL, size_bytes=4, done_bytes=1)


def entry() -> pb.HistoryEntry:
    """An entry of the history whose every text is hostile."""
    return pb.HistoryEntry(actor=EVIL, event=EVIL, subject=EVIL, detail=EVIL, number=7)


def run() -> pb.RunOverview:
    """A run whose every text is hostile."""
    return pb.RunOverview(
        run_id=EVIL, reason=EVIL, task=EVIL, algorithm=EVIL, owner=EVIL, phase=EVIL, metric=EVIL,
        newest_metrics={EVIL: 1.0}, awaited=[EVIL], awaited_count=1,
    )  # fmt: skip


def found() -> pb.GetClientResponse:
    """The client with its sessions."""
    response = pb.GetClientResponse(client=client(), work=EVIL, history=[entry()])
    response.session.address = response.session.instance_id = response.session.certificate_serial = EVIL
    response.standing.reason = EVIL
    response.not_drawn.add(run_id=EVIL, reason=EVIL, why=EVIL, remedy=EVIL)
    return response


def status() -> pb.RunStatus:
    """The same run with all that a person may have to do about it."""
    found = pb.RunStatus(run_id=EVIL, reason=EVIL, policy_refusals={EVIL: 1}, newest_metrics={EVIL: 1.0}, below_due=1)
    found.spec.task.name = found.spec.algorithm.name = found.spec.owner = EVIL
    found.latest_failure.client_id = found.latest_failure.message = EVIL
    found.first_below_due.add(client_id=EVIL)
    found.states.missing = found.states.left_out = 1
    found.states.first_missing.append(EVIL)
    found.states.first_left_out.append(EVIL)
    found.account.refused[EVIL] = 1
    found.account.short, found.account.why_short = 1, EVIL
    return found


CASES: dict[str, dict[str, Any]] = {
    "clients/_list.html": {
        "clients": [client()], "found": 1, "next_page": EVIL, "order": "id",
        "params": Params({"q": [EVIL], "page": [EVIL]}), "all_marks": CLIENT_MARKS,
        "client_states": CLIENT_STATES,
    },
    "client/_head.html": {"found": found(), "client": client()},
    "client/_facts.html": {"facts": client_facts.facts(found()), "client": client()},
    "events/_row.html": {"entry": entry()},
    "federation/_events.html": {"entries": [(entry(), 3)]},
    "federation/_runs.html": {
        "active": [run()], "cards": [run()], "most_cards": 1, "more_active": 0, "ended": [run()], "more_ended": 0,
    },
    "federation/_waits.html": {"active": [run()], "most_waits": 1},
    "federation/_health.html": {
        "overview": pb.GetOverviewResponse(version=EVIL), "problems": [("bad", EVIL, f"/runs/{EVIL}")],
        "health": ("bad", EVIL), "run_states": RUN_STATES, "client_states": CLIENT_STATES, "client_marks": CLIENT_MARKS,
    },
    "federation/_attention.html": {"overview": pb.GetOverviewResponse(attention=[in_need()]), "slowest": [client()]},
    "run/_head.html": {"run": status(), "may_export": True, "rounds": []},
    "run/_clients.html": {"bad": [client()], "attention": known(run_facts.attention(status())), "worst": []},
    "run/_now.html": {"run": status(), "cohort": pb.ListCohortResponse(members=[member()])},
    "run/_figures.html": {"run": status(), "figures": run_facts.figures(status())},
    "run/_marks.html": {"refused_open": 1, "marks": [{"kind": "refused", "text": EVIL, "time": 1.0}]},
    "problem.html": {"view": EVIL, "live": EVIL, "who": None, "title": EVIL, "text": EVIL, "status": 503, "at": EVIL},
}  # fmt: skip


@pytest.mark.parametrize("template", CASES)
def test_hostile_texts_are_escaped(template: str) -> None:
    """No tag and no attribute comes out of an id, a label, a reason, a device's name or an address."""
    text = rendered(template, CASES[template])
    assert "alert(1)" in text.replace("%28", "(").replace("%29", ")")
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "onerror='a'" not in text


def test_the_parts_of_a_view_are_templates() -> None:
    """A part that is sent while a page is open is one that the page includes."""
    page = rendered_source(CLIENT.template)
    assert all(f"include '{template}'" in page and f'id="{name}"' in page for name, template in CLIENT.parts.items())


def rendered_source(template: str) -> str:
    """The text of a template's file."""
    loader = environment().loader
    assert loader is not None
    return loader.get_source(environment(), template)[0]


def test_a_sparkline_needs_two_finite_values() -> None:
    """Otherwise the cell is empty. A value that hardly changes is a flat line in the middle, not noise."""
    assert 'points="2.0,11.0 94.0,11.0"' in spark([0.98, 0.98])
    assert spark([1.0]) == spark([float("nan"), 2.0]) == ""
    assert 'points="2.0,20.0 94.0,2.0"' in spark([0.5, 0.75])
