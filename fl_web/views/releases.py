"""Releases of models and packages, the newest first, and for one of them what became of it on each device."""

from __future__ import annotations

import asyncio

from fl_web.coordinator.reader import Reader
from fl_web.views.view import Context, Params, View
from protos.fl.v1 import admin_pb2 as pb

_PAGE, _DEVICES = 50, 200
_TONES = {"staged": "busy", "released": "good", "rolled_back": "bad"}


def tone_of(release: pb.ReleaseStatus) -> str:
    """How urgent a release is: one that was taken back most."""
    return "warn" if release.state != "rolled_back" and _bad(release) else _TONES.get(release.state, "")


def _bad(release: pb.ReleaseStatus) -> bool:
    """Whether a device failed, refused, or got worse."""
    return bool(release.fell or release.devices.get("failed", 0) or release.devices.get("refused", 0))


async def _context(reader: Reader, params: Params) -> Context:
    model, version, kind = params.text("model"), params.number("version"), params.text("kind")
    overview, page = await asyncio.gather(reader.overview(), reader.releases(_PAGE, params.text("page"), model, kind))
    return {
        "title": f"Releases of {model}" if model else "Releases",
        "overview": overview,
        "releases": [(release, tone_of(release)) for release in page.releases],
        "next_page": page.next_page_token,
        "chosen": await reader.release(kind, model, version, _DEVICES) if model else None,
        "most_devices": _DEVICES,
        "params": params,
        "number": overview.history_number,
    }


RELEASES = View("releases", _context, ("list", "devices"), pause_s=2.0, refresh_s=5.0)
