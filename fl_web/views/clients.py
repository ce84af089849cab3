"""Clients: search and filters, and the page of one client."""

from __future__ import annotations

from fl_web.coordinator.calls import WrongInput
from fl_web.coordinator.reader import Reader
from fl_web.facts import client as client_facts
from fl_web.facts.words import CLIENT_MARKS, CLIENT_STATES, client_number
from fl_web.views.view import Context, Params, View
from protos.fl.v1 import admin_pb2 as pb

_PAGE, _HISTORY = 100, 100
ORDERS = {
    "id": pb.CLIENT_ORDER_ID,
    "state": pb.CLIENT_ORDER_STATE,
    "seen": pb.CLIENT_ORDER_LAST_SEEN,
    "counted": pb.CLIENT_ORDER_UPDATES_COUNTED,
    "refused": pb.CLIENT_ORDER_UPDATES_REFUSED,
    "failed": pb.CLIENT_ORDER_FAILED_SHARE,
    "work": pb.CLIENT_ORDER_WORK_SECONDS,
    "transfer": pb.CLIENT_ORDER_TRANSFER_SECONDS,
    "last": pb.CLIENT_ORDER_LAST_SHARE,
    "epsilon": pb.CLIENT_ORDER_EPSILON,
}
"""Columns by which the list can be ordered."""


async def _context(reader: Reader, params: Params) -> Context:
    order = params.one_of("order", tuple(ORDERS))
    request = pb.ListClientsRequest(
        page_size=_PAGE,
        page_token=params.text("page"),
        state=client_number(params.text("state")),
        labels=_labels(params.texts("label")),
        search=params.text("q"),
        marks=[mark for mark in params.texts("mark") if mark in CLIENT_MARKS],
        order=ORDERS[order],
        descending=params.text("descending") == "1",
    )
    overview = await reader.overview()
    page = await reader.clients(request)
    return {
        "title": "Clients",
        "overview": overview,
        "clients": page.clients,
        "found": page.found,
        "next_page": page.next_page_token,
        "order": order,
        "client_states": CLIENT_STATES,
        "all_marks": CLIENT_MARKS,
        "params": params,
        "number": overview.history_number,
    }


def _labels(texts: list[str]) -> dict[str, str]:
    """key=value of each label. Raises WrongInput."""
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise WrongInput(f"label: expected key=value, got {text[:80]!r}")
        labels[key] = value
    return labels


async def _client(reader: Reader, params: Params) -> Context:
    client_id = params.text("id")
    number = (await reader.overview()).history_number
    details = await reader.client(client_id, _HISTORY)
    return {
        "title": client_id,
        "found": details,
        "client": details.client,
        "facts": [of for of in client_facts.facts(details) if of.name != "needs attention"],  # the head has them
        "entries": [(entry, 0) for entry in reversed(details.history)],
        "params": params,
        "number": number,
    }


CLIENTS = View("clients", _context, ("counts", "list"), pause_s=2.0, refresh_s=5.0)
CLIENT = View("client", _client, ("head", "facts", "events"), refresh_s=3.0)
