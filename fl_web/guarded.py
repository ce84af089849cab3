"""The application with its access control, as `fl web` and the coordinator's web process serve it."""

from __future__ import annotations

from collections.abc import Collection

from fl_web.access.asgi import Application
from fl_web.access.identities import Identities
from fl_web.access.requests import OWN_NAMES, CheckedRequests, Origin
from fl_web.access.sessions import Sessions
from fl_web.app import build_app


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
