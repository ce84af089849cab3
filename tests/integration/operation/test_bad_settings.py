"""A program with wrong settings exits with 2 and prints the expected and the actual value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_ops.errors import OpsError
from tests.processes.federation import TASK, Coordinator, Daemon, Fleet, run_spec
from tests.processes.process import Workspace, run_fl, write_toml


def refused(process: Coordinator | Daemon, **settings: Any) -> str:
    """The stderr of a program that refuses these settings."""
    write_toml(process.config, {**process.settings, **settings})
    assert process.start().wait() == 2
    assert "Traceback" not in process.errors()
    return process.errors()


class Nowhere:
    """An address without a coordinator."""

    address = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        pytest.param({"adminlisten": "x"}, "adminlisten: unknown key, did you mean admin_listen?", id="unknown-key"),
        pytest.param({"limits": {"grace": 1}}, "limits.grace: unknown key, expected one of max_update_mib", id="deep"),
        pytest.param({"listen": "7070"}, "listen: expected host:port", id="address"),
        pytest.param({"insecure": False}, "expected a [tls] section with cert, key and client_ca", id="no-tls"),
        pytest.param(
            {"listen": "0.0.0.0:0"},
            "listen: plain text on 0.0.0.0:0, which others can reach, is refused: add [tls], or set insecure_remote",
            id="plain-text-for-all",
        ),
        pytest.param(
            {"insecure": False, "tls": {"cert": "c.pem", "key": "k.pem"}},
            "anybody could register as any client; to accept that, set tls.no_client_certificates = true",
            id="no-client-ca",
        ),
        pytest.param({"threads": 0}, "threads: expected greater than or equal to 1, got 0", id="value"),
    ],
)
def test_a_coordinator_names_a_wrong_setting(workspace: Workspace, settings: dict[str, Any], text: str) -> None:
    """The message has the file, the key, the expected and the actual value."""
    server = Coordinator(workspace)
    error = refused(server, **settings)
    assert error.startswith(f"fl-server: {server.config}: ")
    assert text in error


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        pytest.param({"client": "x"}, "client: unknown key, did you mean client_id?", id="unknown-key"),
        pytest.param({"task": {"nme": "digits"}}, "task.nme: unknown key, did you mean name?", id="deep"),
        pytest.param(
            {"task": {"name": "digitz"}},
            "expected a built-in task (digits, fashion-mnist, cifar10, cifar100, emnist",
            id="task",
        ),
        pytest.param({"task": {"name": "digitz"}}, 'got "digitz". Did you mean "digits"?', id="task-hint"),
        pytest.param(
            {"task": {"name": "nowhere:Wine"}}, "there is no module nowhere for task nowhere:Wine: install", id="module"
        ),
        pytest.param(
            {"task": {"name": "tiny_task:Tinny"}},
            "module tiny_task has no attribute Tinny; its classes",
            id="attribute",
        ),
        pytest.param(
            {"task": {"name": TASK, "options": {"size": 3}}}, "does not take the options size", id="task-options"
        ),
        pytest.param({"server": "http://a:1"}, "expected host:port, got 'http://a:1': leave out the scheme", id="url"),
        pytest.param({"server": "10.0.0.1:7070"}, "which is not this machine, is refused: add [tls]", id="plain-text"),
        pytest.param({"client_id": "-x"}, "expected 1 to 64 of A-Z a-z 0-9 . _ - that do not start with", id="id"),
    ],
)
def test_a_daemon_names_a_wrong_setting(workspace: Workspace, settings: dict[str, Any], text: str) -> None:
    """The message has the key, the expected and the actual value."""
    error = refused(Daemon(workspace, Nowhere(), "edge-1"), **settings)
    assert error.startswith("fl-client: ")
    assert text in error


def test_a_missing_settings_file_is_named(workspace: Workspace) -> None:
    """Both programs."""
    for process in (Coordinator(workspace), Daemon(workspace, Nowhere(), "edge-1")):
        process.config.unlink()
        assert process.start().wait() == 2
        assert f"{process.config}: expected a settings file there, found none" in process.errors()


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        pytest.param(
            {"algorithm": {"name": "fedcn"}},
            'got "fedcn". Did you mean "fedcm"?',
            id="algorithm",
        ),
        pytest.param(
            {"algorithm": {"name": "fedcm", "parameters": {"alfa": 1}}},
            "unknown parameter of fedcm: 'alfa'. Did you mean 'alpha'?",
            id="parameter",
        ),
        pytest.param(
            {"algorithm": {"name": "fedcm", "parameters": {"alpha": 7}}},
            "parameter 'alpha': expected a number over 0 and at most 1; got 7.0",
            id="parameter-value",
        ),
        pytest.param({"task": {"name": "digitz"}}, 'got "digitz". Did you mean "digits"?', id="task"),
        pytest.param({"task": {"name": TASK, "options": {"size": 3}}}, "does not take the options size", id="options"),
        pytest.param({"round": {"clients_per_round": 0}}, "round.clients_per_round: expected greater than", id="value"),
        pytest.param({"round": {"quorum": 9}}, "quorum to be at most clients_per_round (2), got 9", id="quorum"),
        pytest.param(
            {"round": {"close": "never"}},
            "round.close: expected 'cohort', 'goal' or 'buffer', got 'never'",
            id="choice",
        ),
        pytest.param({"local": {"steps": 3}}, "epochs or steps, got both: remove one", id="work"),
        pytest.param({"initial_model": "/nowhere"}, "initial_model: expected one that you may use", id="initial-model"),
        pytest.param(
            {"stop": {"metric": "accuracy", "target": 0.9}, "evaluation": {"every": 0}},
            "evaluation.every over 0",
            id="no-metric",
        ),
    ],
)
def test_an_impossible_run_is_refused_at_creation(fleet: Fleet, sections: dict[str, Any], text: str) -> None:
    """The run is checked before anything is stored, so its name stays free."""
    with fleet.server.admin() as admin:
        with pytest.raises(OpsError) as refused:
            admin.runs.create_run(run_spec("impossible", **sections))
        assert text in str(refused.value)
        assert "impossible" not in {run.run_id for run in admin.runs.list_runs()}


def test_the_name_of_a_run_is_unique(fleet: Fleet) -> None:
    """A second run of the same name is refused with the remedy."""
    fleet.server.create("once")
    with pytest.raises(OpsError, match="a run 'once' exists already; choose another name"):
        fleet.server.create("once")


def test_the_command_names_an_unknown_key_of_a_run_file(fleet: Fleet, tmp_path: Path) -> None:
    """`fl run create` names file, key and the likely intended key; exit code 2."""
    (tmp_path / "run.toml").write_text('[task]\nname = "digits"\n[round]\nclients_per_rund = 2\n')
    address = str(fleet.server.settings["admin_listen"])
    result = run_fl("run", "create", "run.toml", "--insecure", "--server", address, folder=tmp_path)
    assert result.returncode == 2
    assert "run.toml: unknown key 'round.clients_per_rund'; [round] accepts: sampling, " in result.stderr
    assert "Did you mean 'clients_per_round'?" in result.stderr


def test_the_command_reports_that_no_coordinator_answers(tmp_path: Path) -> None:
    """Without a coordinator the command prints the address and the remedy; exit code 3."""
    result = run_fl("run", "list", "--insecure", "--server", Nowhere.address, folder=tmp_path)
    assert result.returncode == 3
    assert "no coordinator answers at 127.0.0.1:9, where no program listens" in result.stderr
    assert "start one with `fl-server --config server.toml`" in result.stderr


@pytest.mark.parametrize("setting", ["listen", "admin_listen", "metrics_listen"])
def test_a_port_in_use_is_named_by_its_setting(fleet: Fleet, workspace: Workspace, setting: str) -> None:
    """The message for each of the three ports has the address and the remedy."""
    taken = fleet.server.settings[setting]
    error = refused(Coordinator(workspace), **{setting: taken})
    assert f"fl-server: {setting}: cannot listen on {taken}: " in error
    assert "choose another" in error


def test_a_second_coordinator_on_a_state_directory_is_refused(fleet: Fleet, workspace: Workspace) -> None:
    """The message has the process id of the first one, which continues."""
    error = refused(Coordinator(workspace), state_dir=fleet.server.settings["state_dir"])
    assert f"another coordinator runs on {fleet.server.settings['state_dir']}: process {fleet.server.pid} on" in error
    assert fleet.server.exit_code is None


def test_a_state_directory_of_another_program_is_left_alone(workspace: Workspace, tmp_path: Path) -> None:
    """A directory with other files is refused with their names and not changed."""
    (tmp_path / "thesis.tex").write_text("chapter one")
    error = refused(Coordinator(workspace), state_dir=tmp_path)
    assert f"{tmp_path} is no coordinator's state directory: it holds " in error
    assert "name an empty or a new directory" in error
    assert not (tmp_path / "ledger.sqlite").exists()


def test_an_impossible_state_directory_is_named(workspace: Workspace, tmp_path: Path) -> None:
    """A file of that name, and a path that not even root can write."""
    (tmp_path / "file").write_text("")
    error = refused(Coordinator(workspace), state_dir=tmp_path / "file")
    assert f"{tmp_path / 'file'} is not a directory: name a directory for the coordinator's state" in error
    error = refused(Coordinator(workspace, "other"), state_dir="/proc/impetus")
    assert "cannot write in the state directory /proc/impetus" in error


def test_an_impossible_state_directory_of_a_daemon_is_named(workspace: Workspace, tmp_path: Path) -> None:
    """A file of that name, and a path that cannot be written."""
    (tmp_path / "file").write_text("")
    for number, path in enumerate((tmp_path / "file", "/proc/impetus")):
        error = refused(Daemon(workspace, Nowhere(), "edge-1", process=f"daemon-{number}"), state_dir=path)
        assert "fl-client: state_dir: expected a directory that can be written" in error
        assert str(path) in error


def test_a_daemons_state_directory_belongs_to_one_device(fleet: Fleet, workspace: Workspace) -> None:
    """Another client id, and another shard than at the first start, are refused with a message."""
    state = workspace.folder / "state"
    shard = {"partition": {"method": "iid", "clients": 4, "seed": 1}, "index": 0}
    first = Daemon(workspace, fleet.server, "edge-8", state_dir=state, shard=shard).start()
    first.logged("registered")
    assert first.terminate() == 0
    assert len(json.loads((state / "shard.json").read_text())["indices"]) == 48
    error = refused(Daemon(workspace, fleet.server, "edge-9", state_dir=state, shard=shard))
    assert "belongs to client 'edge-8', expected 'edge-9'" in error
    error = refused(first, shard={**shard, "index": 1})
    assert "a device's shard never changes; set it back, or use another state_dir" in error
