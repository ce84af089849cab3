"""Memory of uploads, which goes back to the kernel before the next model is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_server.run import models
from tests.fl_server.harness import until
from tests.fl_server.upload_setup import upload_setup


@pytest.mark.parametrize(("more", "times"), [(0, 1), (1, 0)], ids=["large", "small"])
async def test_freed_memory_is_returned_after_large_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, times: int
) -> None:
    """Once a round, if its updates together reach the limit; and the round is committed."""
    calls: list[None] = []
    monkeypatch.setattr(models, "give_back_freed_memory", lambda: calls.append(None))
    async with upload_setup(tmp_path) as setup:
        monkeypatch.setattr(models, "_LARGE_UPLOADS", 2 * len(setup.data) + more)
        header, data = await setup.b.update(setup.world, await setup.b.assigned())
        assert (await setup.send()).admitted
        assert (await setup.send(header, data, device=setup.b)).admitted
        await until(lambda: setup.run.rounds.committed, "the round is committed")
    assert len(calls) == times
