"""This version opens the state directories of the version before, and the runs continue bit for bit.

`state-before.tar.xz` and `models-before.json` were written by the version before; `make.py` writes both. That the
messages on the wire stay compatible is checked by `buf breaking` against `protos/baseline.binpb` (`make lint-protos`).
"""

from __future__ import annotations

import json

import pytest

from tests.compatibility.make import MODELS, unpack
from tests.compatibility.scenario import ALGORITHMS, CHUNK_BYTES, OPEN_ROUND, Federation
from tests.processes.process import Workspace


@pytest.fixture
def federation(workspace: Workspace) -> Federation:
    """A coordinator and daemons of this version on the stored state directories; the daemons are not started."""
    unpack(workspace.folder)
    return Federation(workspace)


def test_runs_of_the_version_before_continue_bit_for_bit(federation: Federation) -> None:
    """After a kill in the middle of a round: accepted updates count, half uploads resume, client states hold."""
    assert federation.continue_runs() == json.loads(MODELS.read_text())
    for run in ALGORITHMS:
        accepted, resumed = federation.daemons[f"{run}-0"], federation.daemons[f"{run}-1"]
        assert not accepted.events("trained", round=OPEN_ROUND)
        assert not accepted.events("submitted", round=OPEN_ROUND)
        assert not resumed.events("trained", round=OPEN_ROUND)
        (event,) = federation.server.events("upload_resumed", run=run)
        assert event["client"] == f"{run}-1"
        assert event["offset"] >= CHUNK_BYTES
        lost = {"update_dropped", "round_restarted", "states_restarted"}
        assert not lost & set(federation.server.history(run))
