"""The page of releases: states, devices, and texts of other machines."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from rich.console import Console, RenderableType

from fl_ops.render.releases import packages_table, release_details
from fl_web.facts.release import metric_text, rules_text
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


def package() -> pb.ReleaseStatus:
    """A package that more work failed with."""
    facts = pb.PackageFacts(version="1.2", digest="sha256:3f", wheels=["wounds-1.2-py3-none-any.whl"])
    facts.work.CopyFrom(pb.PackageWork(ended=12, failed=3))
    facts.work_before.CopyFrom(pb.PackageWork(ended=40))
    rules = pb.ReleaseRules(stages=[0.1, 1.0], most_failed=0.1, most_rise=0.2)
    return pb.ReleaseStatus(kind="package", model="wounds", version=2, state="staged", package=facts, rules=rules)


def printed(shown: RenderableType) -> str:
    """What a wide terminal has."""
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(shown)
    return cast(io.StringIO, console.file).getvalue()


def test_a_package_shows_its_work_where_a_model_shows_its_metric() -> None:
    """In the terminal and on the page; it is of no run, so nothing links to one."""
    assert metric_text(package()) == "0 of 40 -> 3 of 12 failed"
    assert rules_text(package()).endswith("10% fail, or if more of its work fails than before, by more than 20%")
    shown = [printed(table) for table in (packages_table([package()]), release_details(package()))]
    assert all("0 of 40 -> 3 of 12 failed" in text and "sha256:3f" in text for text in shown)
    parts = {"releases": [(package(), "busy")], "params": Params({}), "next_page": ""}
    assert "/runs/" not in rendered("releases/_list.html", parts)


class Readings:
    """A coordinator with one release."""

    async def overview(self) -> pb.GetOverviewResponse:
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
