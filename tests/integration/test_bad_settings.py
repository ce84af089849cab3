"""What cannot start says what was expected, what came and what to do, and exits with 2."""

from __future__ import annotations

import json

import pytest

from fl_ops.errors import OpsError
from tests.integration.harness import TASK, Coordinator, Daemon, run_spec
from tests.integration.processes import command, write_toml


def refused(process, **settings):
    """What a program says on stderr when it is started with these settings and cannot be."""
    write_toml(process.config, {**process.settings, **settings})
    assert process.start().wait() == 2
    assert "Traceback" not in process.errors()
    return process.errors()


class Nowhere:
    """In place of a coordinator that nobody needs to reach."""

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
        pytest.param({"threads": 0}, "threads: expected greater than or equal to 1, got 0", id="value"),
    ],
)
def test_a_coordinator_with_wrong_settings_says_which(place, settings, text):
    """File, key, what was expected and what came."""
    server = Coordinator(place)
    said = refused(server, **settings)
    assert said.startswith(f"fl-server: {server.config}: ")
    assert text in said


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
def test_a_daemon_with_wrong_settings_says_which(place, settings, text):
    """Key, what was expected and what came."""
    said = refused(Daemon(place, Nowhere, "edge-1"), **settings)
    assert said.startswith("fl-client: ")
    assert text in said


def test_a_missing_settings_file_is_told_by_name(place):
    """Both programs."""
    for process in (Coordinator(place), Daemon(place, Nowhere, "edge-1")):
        process.config.unlink()
        assert process.start().wait() == 2
        assert f"{process.config}: expected a settings file there, found none" in process.errors()


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        pytest.param(
            {"algorithm": {"name": "fedcn"}},
            "unknown algorithm: 'fedcn'. Did you mean 'fedcm'? Available",
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
            {"round": {"close": "never"}}, "round.close: expected 'cohort' or 'goal', got 'never'", id="choice"
        ),
        pytest.param({"local": {"steps": 3}}, "epochs or steps, got both: remove one", id="work"),
        pytest.param({"initial_model": "/nowhere"}, "initial_model: expected a safetensors file", id="initial-model"),
        pytest.param({"stop": {"target": 0.9}, "evaluation": {"every": 0}}, "evaluation.every over 0", id="no-metric"),
    ],
)
def test_a_run_that_cannot_be_is_refused_when_it_is_created(fleet, sections, text):
    """Checked as a whole before anything is stored: nothing of it is left, and the name is free."""
    with fleet.server.admin() as admin:
        with pytest.raises(OpsError) as refused:
            admin.create_run(run_spec("impossible", **sections))
        assert text in str(refused.value)
        assert "impossible" not in {run.run_id for run in admin.list_runs()}


def test_a_name_is_given_once(fleet):
    """A second run of the same name is refused with what to do."""
    fleet.server.create("once")
    with pytest.raises(OpsError, match="a run 'once' exists already; choose another name"):
        fleet.server.create("once")


def test_the_command_tells_an_unknown_key_of_a_runs_file(fleet, tmp_path):
    """`fl run create` names file and key, and the one that was meant; exit code 2."""
    (tmp_path / "run.toml").write_text('[task]\nname = "digits"\n[round]\nclients_per_rund = 2\n')
    address = str(fleet.server.settings["admin_listen"])
    result = command("run", "create", "run.toml", "--insecure", "--server", address, folder=tmp_path)
    assert result.returncode == 2
    assert "run.toml: unknown key 'round.clients_per_rund'; [round] accepts: sampling, " in result.stderr
    assert "Did you mean 'clients_per_round'?" in result.stderr


def test_the_command_says_that_nobody_answers(tmp_path):
    """No coordinator: exit code 3, the address, and what to do."""
    result = command("run", "list", "--insecure", "--server", Nowhere.address, folder=tmp_path)
    assert result.returncode == 3
    assert "no coordinator answers at 127.0.0.1:9: start one with `fl-server --config server.toml`" in result.stderr


@pytest.mark.parametrize("setting", ["listen", "admin_listen", "metrics_listen"])
def test_a_port_in_use_is_told_by_its_setting(fleet, place, setting):
    """Each of the three ports, with the address and what to do."""
    taken = fleet.server.settings[setting]
    said = refused(Coordinator(place), **{setting: taken})
    assert f"fl-server: {setting}: cannot listen on {taken}: " in said
    assert "choose another" in said


def test_a_second_coordinator_on_a_state_directory_is_told_who_holds_it(fleet, place):
    """Refused with the process id of the first, which goes on undisturbed."""
    said = refused(Coordinator(place), state_dir=fleet.server.settings["state_dir"])
    assert f"another coordinator runs on {fleet.server.settings['state_dir']}: process {fleet.server.pid} on" in said
    assert fleet.server.exit_code is None


def test_a_state_directory_of_another_program_is_left_alone(place, tmp_path):
    """Files that no coordinator wrote: refused with their names, and untouched."""
    (tmp_path / "thesis.tex").write_text("chapter one")
    said = refused(Coordinator(place), state_dir=tmp_path)
    assert f"{tmp_path} is no coordinator's state directory: it holds " in said
    assert "name an empty or a new directory" in said
    assert not (tmp_path / "ledger.sqlite").exists()


def test_a_state_directory_that_cannot_be_is_told_by_its_path(place, tmp_path):
    """A file in its place, and a place where nobody can write, not even root."""
    (tmp_path / "file").write_text("")
    said = refused(Coordinator(place), state_dir=tmp_path / "file")
    assert f"{tmp_path / 'file'} is not a directory: name a directory for the coordinator's state" in said
    said = refused(Coordinator(place, "other"), state_dir="/proc/impetus")
    assert "cannot write in the state directory /proc/impetus" in said


def test_a_daemons_state_directory_that_cannot_be_is_told_by_its_path(place, tmp_path):
    """A file in its place, and a place where nobody can write."""
    (tmp_path / "file").write_text("")
    for number, path in enumerate((tmp_path / "file", "/proc/impetus")):
        said = refused(Daemon(place, Nowhere, "edge-1", process=f"daemon-{number}"), state_dir=path)
        assert "fl-client: state_dir: expected a directory that can be written" in said
        assert str(path) in said


def test_a_daemons_state_directory_is_one_devices(fleet, place):
    """Another name on the same directory, and another shard than the first start's, are refused in words."""
    state = place.folder / "state"
    shard = {"partition": {"method": "iid", "clients": 4, "seed": 1}, "index": 0}
    first = Daemon(place, fleet.server, "edge-8", state_dir=state, shard=shard).start()
    first.logged("registered")
    assert first.terminate() == 0
    assert len(json.loads((state / "shard.json").read_text())["indices"]) == 48
    said = refused(Daemon(place, fleet.server, "edge-9", state_dir=state, shard=shard))
    assert "belongs to client 'edge-8', expected 'edge-9'" in said
    said = refused(first, shard={**shard, "index": 1})
    assert "a device's shard never changes; set it back, or use another state_dir" in said
