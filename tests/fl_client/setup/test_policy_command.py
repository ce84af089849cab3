"""`fl-client policy show` and `check`: what a device would do with a run's file."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from fl_client.__main__ import main
from fl_client.settings.config import load_config
from fl_client.setup import policy as command
from fl_client.setup.doctor.files import check_policy as doctor_check
from fl_client.setup.doctor.findings import Level
from fl_server.run_settings.config import RunConfig
from tests.processes.certificates import Pki

RUN = '[task]\nname = "digits"\n[local]\nepochs = 5\nbatch_size = 10\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device's settings with an empty policy, and a run's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client.toml").write_text(
        'client_id = "edge-1"\nserver = "127.0.0.1:7070"\nstate_dir = "state"\ninsecure = true\n'
        'policy = "policy.toml"\n[task]\nname = "digits"\n'
    )
    (tmp_path / "policy.toml").write_text("")
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "state").mkdir()
    return tmp_path


RULE = "without round.min_accepted does not decide it, but the coordinator's own rule"


def policy(*arguments: str) -> int:
    """Run `fl-client policy` with the device's settings; returns the exit code."""
    return main(["policy", *arguments, "--config", "client.toml"])


def test_an_accepted_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rule is listed, and the exit code is 0."""
    (folder / "policy.toml").write_text('[tasks]\nallow = ["digits"]\n[algorithms]\nallow = ["fedcm"]\n')
    assert policy("check", "run.toml") == 0
    assert capsys.readouterr().out.splitlines() == [
        "accept  tasks: the run's task is 'digits', and this device has 'digits'",
        "accept  tasks: 'digits' is in tasks.allow",
        "accept  algorithms: 'fedcm' is in algorithms.allow",
        f"open    work: work.min_clients is 3; a run's file {RULE}",
        "open    work: work.min_examples is 16; a run's file does not decide it",
        "accept  work: work.min_batch_size is 4, and the assignment has 10",
        "run.toml: accepted; 2 not decided by a run's file",
    ]


@pytest.mark.parametrize(("stated", "code"), [(2, 1), (3, 0)])
def test_the_clients_of_a_round_are_judged_if_the_file_states_them(
    folder: Path, capsys: pytest.CaptureFixture[str], stated: int, code: int
) -> None:
    """`round.min_accepted` of the run's file; a coordinator raises it at most."""
    (folder / "run.toml").write_text(RUN + f"[round]\nmin_accepted = {stated}\n")
    assert policy("check", "run.toml") == code
    assert f"work: work.min_clients is 3, and the assignment has {stated}\n" in capsys.readouterr().out


def test_a_refused_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each refusing rule is named, also those behind the first one; the exit code is 1."""
    text = '[algorithms]\nallow = ["fedavg"]\n[work]\nmax_epochs = 4\nmax_model_bytes = 9\n[day]\nmax_steps = 3\n'
    (folder / "policy.toml").write_text(text)
    assert policy("check", "run.toml", "--examples", "100") == 1
    out = capsys.readouterr().out
    assert "REFUSE  algorithms: 'fedcm' is not in algorithms.allow" in out
    assert "REFUSE  work: work.max_epochs is 4, and the assignment has 5" in out
    assert "REFUSE  day: day.max_steps is 3, and the assignment has 50" in out
    assert "open    work: work.max_model_bytes is 9" in out
    assert out.endswith("run.toml: refused by algorithms, work, day\n")


def test_steps_are_judged_by_the_shard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of examples comes from the shard of an earlier start; without one the rule stays open."""
    (folder / "policy.toml").write_text("[work]\nmax_epochs = 4\n")
    (folder / "run.toml").write_text(RUN.replace("epochs = 5", "steps = 41"))
    assert policy("check", "run.toml") == 0
    assert "3 not decided by a run's file" in capsys.readouterr().out
    (folder / "state" / "shard.json").write_text(json.dumps({"indices": list(range(100))}))
    assert policy("check", "run.toml") == 1
    assert "work.max_epochs is 4, and the assignment has 4.1" in capsys.readouterr().out


def test_evaluations_by_clients_are_judged(folder: Path) -> None:
    """Only where the run asks clients to evaluate."""
    (folder / "policy.toml").write_text("[share]\nevaluations = false\n")
    assert policy("check", "run.toml") == 0
    (folder / "run.toml").write_text(RUN + "[evaluation]\nclients_every = 1\n")
    assert policy("check", "run.toml") == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.toml", "[tsk]\nname = 'x'", "unknown key 'tsk'"),
        ("run.toml", "", "expected a table [task] with a name, got none"),
        ("run.toml", "[", "run.toml"),
        ("policy.toml", "[tasks]\nalow = []", "tasks.alow: unknown key, did you mean allow?"),
        ("client.toml", "", "client.toml"),
    ],
)
def test_a_wrong_file_ends_with_two(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    """The error names the file and the key."""
    (folder / name).write_text(text)
    assert policy("check", "run.toml") == 2
    assert message in capsys.readouterr().err
    assert policy("check", "missing.toml") == 2


def test_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rules that are set, and what is used of the day."""
    (folder / "policy.toml").write_text('[tasks]\nallow = ["digits"]\n[day]\nmax_steps = 100\n')
    today = datetime.fromtimestamp(time.time()).astimezone().date()
    used = {"day": str(today), "steps": 40}
    (folder / "state" / "usage.json").write_text(json.dumps(used))
    assert policy("show") == 0
    out = capsys.readouterr().out
    assert '[tasks]\nallow = ["digits"]\n[day]\nmax_steps = 100\n# today: steps 40 of 100\n' in out
    settings = (folder / "client.toml").read_text().replace('policy = "policy.toml"\n', "")
    (folder / "client.toml").write_text(settings)
    assert policy("show") == 0
    assert "no policy" in capsys.readouterr().out


def test_the_defaults_of_a_run_are_the_coordinators() -> None:
    """A run's file without them gets these."""
    config = RunConfig.model_validate({"task": {"name": "digits"}})
    assert (command.DEFAULT_ALGORITHM, command.DEFAULT_BATCH_SIZE, command.DEFAULT_EPOCHS) == (
        config.algorithm.name, config.local.batch_size, config.local.epochs,
    )  # fmt: skip


def test_the_doctor_checks_the_policy(folder: Path) -> None:
    """A file that cannot be read, a task that is not allowed, pins that fit no certificate, and privacy."""

    def found(text: str) -> list[tuple[Level, str]]:
        (folder / "policy.toml").write_text(text)
        return [(finding.level, finding.message) for finding in doctor_check(load_config(folder / "client.toml"))]

    assert [level for level, _ in found("")] == [Level.OK]
    assert [level for level, _ in found("[tasks")] == [Level.FAIL]
    assert found("[tasks]\nallow = []")[1][0] is Level.FAIL
    assert found('[coordinators]\nids = ["x"]')[1][0] is Level.WARN
    assert [level for level, _ in found("[privacy]\nrequire = true")] == [Level.OK]
    pins = f'[coordinators]\nca_sha256 = ["{"ab" * 32}"]'
    assert "expected [tls]" in found(pins)[1][1]
    files = Pki(folder / "pki").issue("client", "edge-1")
    settings = (folder / "client.toml").read_text().replace("insecure = true\n", "")
    (folder / "client.toml").write_text(
        f'{settings}[tls]\nca = "{files.ca}"\ncert = "{files.cert}"\nkey = "{files.key}"\n'
    )
    assert "expected a certificate of coordinators.ca_sha256" in found(pins)[1][1]
