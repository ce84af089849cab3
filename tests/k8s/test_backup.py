"""A backup by the commands of k8s/README.md, and what a coordinator makes of it: real processes, and the page's tar."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import read_page
from tests.integration.harness import Fleet
from tests.integration.processes import Place

EXEC = re.compile(r"^\$ kubectl exec (?:--stdin )?fl-state --namespace impetus -- (.*)$", re.MULTILINE)


def in_the_pod(section: str) -> list[str]:
    """What the page runs in the pod that has the volume, under a heading."""
    page = read_page("k8s/README.md")
    begin = page.index(f"\n## {section}\n")
    return EXEC.findall(page[begin : page.index("\n## ", begin + 1)])


def do(commands: list[str], state: Path, folder: Path) -> None:
    """Run them on a state directory, with the backup in a folder."""
    assert commands
    for command in commands:
        here = command.replace("/var/lib/impetus", str(state))
        subprocess.run(["bash", "-c", here], cwd=folder, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_backup_goes_on_where_it_was_made(tmp_path):
    """Made with one update in and one missing; the run ends; the volume is lost. The restored one does it all again.

    Daemons are rounds ahead of the restored coordinator then, and the models that come out are the same.
    """
    with Place(tmp_path) as place:
        fleet = Fleet(place, 3)
        server, state = fleet.server, Path(fleet.server.settings["state_dir"])
        fleet.half_delivered("kept", stop={"rounds": 3})
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        do(in_the_pod("Back up"), state, tmp_path)
        server.serve()
        fleet.release()
        digests = server.digests("kept")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        do(in_the_pod("Restore"), state, tmp_path)
        fleet.hold()
        server.serve()
        assert server.rounds("kept") == []
        fleet.release()
        assert server.digests("kept") == digests
        assert len(digests) == 3
