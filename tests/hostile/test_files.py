"""Files that other users of a machine can read when the programs run with the usual umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_ops.errors import UsageError
from tests.hostile.federation import Federation
from tests.processes.certificates import section
from tests.processes.federation import Daemon
from tests.processes.process import Workspace

USUAL = 0o022
"""Files 0644, folders 0755."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A federation with the usual umask. Existing files of one daemon and the coordinator are open."""
    before = os.umask(USUAL)
    folder = tmp_path_factory.mktemp("files")
    for name in ("server-state", "honest-0-state"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)
        (folder / name / "lock").touch()
        (folder / name / "lock").chmod(0o644)
    try:
        with Workspace(folder) as workspace:
            yield Federation(workspace)
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Paths that other users may read or write, the folder itself included."""
    found = (folder, *folder.rglob("*"))
    return [f"{path} {stat.filemode(path.stat().st_mode)}" for path in found if path.stat().st_mode & 0o077]


@pytest.mark.slow
def test_other_users_cannot_read_updates_models_or_the_ledger(federation: Federation, undisturbed: list[str]) -> None:
    """During a round with stored updates, and after a run, nothing in a state directory is open."""
    server, daemons = federation.server, federation.daemons
    run_id = federation.begin_run()
    server.until(run_id, lambda run: run.rounds_done, "a round is committed")
    settings = [server.settings, *(daemon.settings for daemon in daemons.values())]
    states = [Path(each["state_dir"]) for each in settings]
    federation.still_works(undisturbed, run_id)
    assert all(any(state.rglob("*")) for state in states)
    assert [each for state in states for each in open_to_others(state)] == []


def test_programs_refuse_a_key_that_everybody_reads(federation: Federation) -> None:
    """Coordinator, daemon and operator each name the file, its mode and the command that corrects it."""
    files = federation.pki.issue("client", "open")
    files.key.chmod(0o644)
    daemon = Daemon(federation.workspace, federation.server, "open", insecure=False, tls=section(files)).start()
    assert daemon.wait() == 2
    assert f"got {files.key} with mode 0644: chmod 600 {files.key}" in daemon.errors()
    with pytest.raises(UsageError, match=f"got {files.key} with mode 0644: chmod 600 {files.key}"):
        federation.server.admin(files)
    own = Path(federation.server.settings["tls"]["key"])
    own.chmod(0o644)
    federation.server.terminate()
    assert federation.server.start().wait() == 2
    assert f"tls.key: expected a private key that only its owner can read, got {own}" in federation.server.errors()
    own.chmod(0o600)
    federation.server.serve()
