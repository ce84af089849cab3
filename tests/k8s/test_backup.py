"""A backup and its restore by the commands of k8s/operate.md, with real processes and the page's tar."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.docs.pages import read_page
from tests.processes.federation import Fleet
from tests.processes.process import ROOT, Workspace

EXEC = re.compile(r"^\$ kubectl exec (?:--stdin )?fl-state --namespace impetus -- (.*)$", re.MULTILINE)


def in_the_pod(section: str) -> list[str]:
    """The commands under a heading that run in the pod with the volume."""
    page = read_page("k8s/operate.md")
    begin = page.index(f"\n## {section}\n")
    return EXEC.findall(page[begin : page.index("\n## ", begin + 1)])


def of_the_script() -> list[str]:
    """The commands of the restore script that empty the volume and extract the archive."""
    script = (ROOT / "k8s/tools/restore.sh").read_text()
    found = re.findall(
        r"^kubectl exec (?:--stdin )?fl-state --namespace impetus -- ((?:find|tar) .*)$", script, re.MULTILINE
    )
    return [command.replace('"$1"', "state.tar") for command in found]


def do(commands: list[str], state: Path, folder: Path) -> None:
    """Run them on a state directory, with the backup in a folder."""
    assert commands
    for command in commands:
        here = command.replace("/var/lib/impetus", str(state))
        subprocess.run(["bash", "-c", here], cwd=folder, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_continues_from_a_backup(tmp_path: Path) -> None:
    """The backup is made with one of two updates. The run ends, the volume is lost, and the restored run repeats.

    The daemons are then rounds ahead of the restored coordinator, and the models are the same.
    """
    with Workspace(tmp_path) as workspace:
        fleet = Fleet(workspace, 3)
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
        do(of_the_script(), state, tmp_path)
        fleet.hold()
        server.serve()
        assert server.rounds("kept") == []
        fleet.release()
        assert server.digests("kept") == digests
        assert len(digests) == 3


USER = 10001
"""User and group of the pods."""


@pytest.fixture
def volume() -> Iterator[Path]:
    """A volume as the kubelet makes it: its directory belongs to root, and the pod's group may write in it."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, for files of two owners, and setpriv")
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # the pod's user must reach the volume
        folder = Path(name, "volume")
        folder.mkdir()
        os.chown(folder, 0, USER)
        folder.chmod(0o2775)
        yield folder


def as_the_pod(commands: list[str], state: Path, folder: Path) -> list[tuple[int, bytes]]:
    """Run commands of the page on a volume as the pod's user, with the backup in a folder of root.

    Returns exit code and errors of each.
    """
    assert commands
    return [_as_the_pod(command.replace("/var/lib/impetus", str(state)), folder) for command in commands]


def _as_the_pod(command: str, folder: Path) -> tuple[int, bytes]:
    pod = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "bash", "-c"]
    inside, _, backup = command.partition(" < ")
    if backup:
        with (folder / backup).open("rb") as file:
            done = subprocess.run([*pod, inside], check=False, stdin=file, capture_output=True)
        return done.returncode, done.stderr
    inside, _, backup = command.partition(" > ")
    done = subprocess.run([*pod, inside], check=False, capture_output=True)
    if backup:
        (folder / backup).write_bytes(done.stdout)
    return done.returncode, done.stderr


@pytest.mark.parametrize("has_entry", [False, True], ids=["the page's archive", "one with an entry for the directory"])
def test_a_backup_is_restored_into_a_volume_of_root(volume: Path, tmp_path: Path, has_entry: bool) -> None:
    """No command fails, the files are back, and owner and mode of the directory stay."""
    as_the_pod(["cd /var/lib/impetus && mkdir -m 0700 spool && echo kept >spool/update"], volume, tmp_path)
    backup, restore = in_the_pod("Back up"), of_the_script()
    if has_entry:
        [other] = re.findall(r"restored by `(.*?)`", read_page("k8s/operate.md"))
        backup, restore = ["tar -C /var/lib/impetus -cf - . > state.tar"], [restore[0], f"{other} < state.tar"]
    before = (volume.stat().st_uid, volume.stat().st_gid, volume.stat().st_mode)
    done = as_the_pod([*backup, *restore], volume, tmp_path)
    assert done == [(0, b"")] * 3
    assert (volume / "spool" / "update").read_text() == "kept\n"
    assert (volume / "spool").stat().st_mode & 0o777 == 0o700
    assert (volume.stat().st_uid, volume.stat().st_gid, volume.stat().st_mode) == before
