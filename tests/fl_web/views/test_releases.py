"""The page of releases: states, devices, and texts of other machines."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fl_web.rendering import rendered
from fl_web.views.releases import RELEASES, tone_of
from fl_web.views.view import Params
from protos.fl.v1 import admin_pb2 as pb

EVIL = """"><script>alert(1)</script>"""


def release(state: str = "staged", **devices: int) -> pb.ReleaseStatus:
    """A release whose every text is hostile."""
    made = pb.ReleaseStatus(
        model=EVIL, version=2, state=state, reason=EVIL, run_id=EVIL, round=3, labels={EVIL: EVIL}, signer=EVIL,
        digest=EVIL, share=0.1, devices=devices, metric_before=0.5, metric_now=0.25, form=EVIL, owner=EVIL,
    )  # fmt: skip
    made.rules.stages[:], made.rules.metric = [0.1, 1.0], EVIL
    return made


class Readings:
    """A coordinator with one release."""

    async def overview(self, _: Any) -> pb.GetOverviewResponse:
        """No run."""
        return pb.GetOverviewResponse(history_number=4)

    async def releases(self, *_: Any) -> pb.ListReleasesResponse:
        """The release."""
        return pb.ListReleasesResponse(releases=[release(evaluated=1, refused=1)])

    async def release(self, *_: Any) -> pb.GetReleaseResponse:
        """Its devices."""
        device = pb.ReleaseDevice(client_id=EVIL, state="refused", detail=EVIL, metrics={EVIL: 1.0}, fell=True)
        return pb.GetReleaseResponse(release=release(), devices=[device], next_page_token="more")


@pytest.mark.parametrize(
    ("state", "devices", "tone"),
    [("staged", {"evaluated": 2}, "busy"), ("released", {"failed": 1}, "warn"), ("rolled_back", {"failed": 1}, "bad"),
     ("released", {"evaluated": 2}, "good")],
)  # fmt: skip
def test_what_is_bad_stands_out(state: str, devices: dict[str, int], tone: str) -> None:
    """A device that failed warns before the rule takes the release back."""
    assert tone_of(release(state, **devices)) == tone


async def test_the_page_shows_releases_and_the_devices_of_one() -> None:
    """Without a model in the address the list alone; no text of a coordinator becomes markup."""
    listed = await RELEASES.context(cast(Any, Readings()), Params({}))
    assert (listed["chosen"], listed["number"]) == (None, 4)
    shown = await RELEASES.context(cast(Any, Readings()), Params({"model": [EVIL], "version": ["2"]}))
    text = rendered("releases.html", {"view": "releases", "live": "", "who": None, "parts": RELEASES.parts, **shown})
    assert "<script>alert" not in text
    assert "1 evaluated, 1 refused" in text
    assert "refused, fell" in text
    assert "0.5 -&gt; 0.25" in text
    assert "staged, 10%" in text
    assert "The first 200 devices" in text
