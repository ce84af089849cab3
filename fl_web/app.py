"""The web application: addresses, pages, event streams and files. Access control wraps it from outside.

Every request must come with a Reader in `request.state.reader`, which has the identity of its browser.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from fl_web.access.identities import Identities
from fl_web.access.requests import OWN_NAMES, Application, CheckedRequests, Origin
from fl_web.access.sessions import Sessions
from fl_web.coordinator.calls import NotFound, WebError
from fl_web.coordinator.reader import Reader
from fl_web.live import Readings, Shown, ViewStream
from fl_web.rendering import STATIC, load_templates, moment, rendered
from fl_web.views import data
from fl_web.views.clients import CLIENT, CLIENTS
from fl_web.views.compare import COMPARE
from fl_web.views.events import EVENTS
from fl_web.views.federation import FEDERATION, RUNS
from fl_web.views.releases import RELEASES
from fl_web.views.run import RUN
from fl_web.views.view import Context, Params, View

_PAGES = {
    "/": FEDERATION,
    "/runs": RUNS,
    "/runs/{id}": RUN,
    "/compare": COMPARE,
    "/clients": CLIENTS,
    "/clients/{id:path}": CLIENT,
    "/releases": RELEASES,
    "/events": EVENTS,
}
_VIEWS = {view.name: view for view in _PAGES.values()}
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_NUMBER_DIGITS = 18


def build_app() -> Starlette:
    """The application, without access control."""
    load_templates()
    readings = Readings()
    return Starlette(
        routes=[
            Route("/runs/{id}/curves.json", _answer(data.curves)),
            Route("/runs/{id}/rounds.csv", _answer(data.rounds_csv)),
            Route("/runs/{id}/model", _answer(data.model)),
            Route("/compare.json", _answer(data.compare_curves)),
            *(Route(path, _page(view)) for path, view in _PAGES.items()),
            Route("/live", _live(readings)),
            Route("/healthz", _healthz),
            Mount("/static", _Files(directory=STATIC)),
        ],
        exception_handlers={WebError: _problem, HTTPException: _http_problem},
    )


class _Files(StaticFiles):
    """Files that a browser keeps for ever if their address has their hash. Modules import one another without it."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        kept = "public, max-age=31536000, immutable" if scope["query_string"] else "no-cache"
        response.headers["Cache-Control"] = kept
        return response


def _params(request: Request) -> Params:
    query = request.query_params
    values = {name: query.getlist(name) for name in query}
    return Params({**values, **{name: [str(value)] for name, value in request.path_params.items()}})


def _page(view: View) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        params, reader = _params(request), _reader(request)
        context = await view.context(reader, params)
        who = await reader.who_am_i()
        address = params.address("page", view=view.name, after=context["number"], page=params.text("page"))
        base: Context = {"view": view.name, "live": f"/live?{address}", "who": who, "parts": view.parts}
        return HTMLResponse(rendered(view.template, {**base, **context}), headers={"Cache-Control": "no-store"})

    return page


def _answer(make: Callable[[Reader, Params], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        response = await make(_reader(request), _params(request))
        response.headers["Cache-Control"] = "no-store"
        return response

    return answer


def _live(readings: Readings) -> Callable[[Request], Awaitable[Response]]:
    async def live(request: Request) -> Response:
        params = _params(request)
        view = _VIEWS.get(params.text("view"))
        if view is None:
            raise NotFound(f"expected view = one of {', '.join(_VIEWS)}")
        resumed = request.headers.get("last-event-id", "")
        known = resumed.isascii() and resumed.isdigit() and len(resumed) <= _NUMBER_DIGITS
        after = int(resumed) if known else params.number("after")
        stream = ViewStream(Shown(view, _reader(request), params.without("after", "view")), after, readings)
        return StreamingResponse(stream.messages(), media_type="text/event-stream", headers=_STREAM_HEADERS)

    return live


async def _healthz(_: Request) -> Response:
    """Whether this process serves. The coordinator has its own health service."""
    return PlainTextResponse("ok\n")


def _reader(request: Request) -> Reader:
    reader = getattr(request.state, "reader", None)
    if not isinstance(reader, Reader):
        raise HTTPException(401, "this address needs a login")
    return reader


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, WebError)  # noqa: S101 - registered for it
    return _problem_page(request, error.status, error.title, str(error))


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    title = {404: "Not found", 405: "Not allowed here", 401: "Login needed"}.get(error.status_code, "Not possible")
    return _problem_page(request, error.status_code, title, error.detail)


def _problem_page(request: Request, status: int, title: str, text: str) -> Response:
    if request.url.path.endswith((".json", ".csv")) or request.url.path == "/live":
        return PlainTextResponse(f"{title}: {text}\n", status)
    context = {"view": "problem", "live": "", "who": None, "title": title, "text": text, "status": status}
    headers = {"Cache-Control": "no-store", "Retry-After": "3"} if status == 503 else {"Cache-Control": "no-store"}
    return HTMLResponse(rendered("problem.html", {**context, "at": moment(time.time())}), status, headers)


def guarded_app(identities: Identities, how: str, *, hosts: Collection[str] = (), secure: bool = False) -> Application:
    """The whole web application.

    Args:
        identities: where browsers get their identity from.
        how: a person's way to a login link, as text.
        hosts: names of the page beside this machine's own.
        secure: whether it is served with TLS.
    """
    origin = Origin("https" if secure else "http", frozenset({*OWN_NAMES, *(host.lower() for host in hosts)}))
    return CheckedRequests(Sessions(build_app(), identities, how, secure=secure), origin)
