"""`fl-client init`: by flags and by answers, into a file that explains itself, with which a real daemon works."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_client.__main__ import main
from fl_client.settings.config import ClientConfig, load_config
from fl_client.setup.settings_file import settings_text, toml
from tests.fl_client.setup.conftest import TASK, Site
from tests.processes.federation import Coordinator
from tests.processes.process import TIMEOUT_S, Process, Workspace

ROOT = Path(__file__).parents[3]
PLAIN = [
    "--server",
    "127.0.0.1:7070",
    "--insecure",
    "--client-id",
    "edge-1",
    "--task",
    "digits",
    "--yes",
    "--no-doctor",
]

Init = Callable[..., int]
"""Flags -> exit code."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Where init writes."""
    return tmp_path / "edge-1.toml"


@pytest.fixture
def init(config: Path) -> Init:
    """Runs init with flags; gives its exit code."""
    return lambda *flags: main(["init", "--config", str(config), *flags])


def attends(workspace: Workspace, server: Coordinator, name: str) -> bool:
    """Whether a daemon with the settings of that name attends to the coordinator."""
    Process(workspace, name, "fl_client").start()
    server.until_present(name)
    return True


def test_a_daemon_works_with_settings_from_flags(
    init: Init, config: Path, plain_server: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is written and has no fault, exit code 0. A real daemon attends to a real coordinator with it."""
    shard = ["--partition", "method=iid,clients=3,seed=1", "--index", "2", "--label", "site=north"]
    code = init(
        "--server", plain_server.address, "--insecure", "--client-id", "edge-1", "--task", TASK, *shard, "--yes"
    )
    assert (code, "a daemon can work here" in capsys.readouterr().out) == (0, True)
    with Workspace(config.parent) as workspace:
        assert attends(workspace, plain_server, "edge-1")
    assert plain_server.client("edge-1").labels == {"site": "north"}


def test_a_daemon_finds_certificates_next_to_the_settings(
    init: Init, config: Path, tls_server: Coordinator, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """With mTLS no flag is needed for files in tls/ next to the settings, with the names that containers use."""
    files = site.issue("client", "edge-1")
    (config.parent / "tls").mkdir()
    for key, name in (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key")):
        (config.parent / "tls" / name).write_bytes(Path(files[key]).read_bytes())
        (config.parent / "tls" / name).chmod(0o600)
    assert init("--server", tls_server.address, "--task", TASK, "--yes") == 0
    assert "0 WARN, 0 FAIL" in capsys.readouterr().out
    with Workspace(config.parent) as workspace:
        Process(workspace, "edge-1", "fl_client").start().logged("registered")


def test_settings_are_written_also_for_a_device_with_faults(
    init: Init, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a coordinator the file is written, exit code 1."""
    assert init(*PLAIN[:-1], "--server", "127.0.0.1:9") == 1
    assert load_config(config).server == "127.0.0.1:9"
    assert "FAIL port" in capsys.readouterr().out


def test_existing_settings_are_kept(init: Init, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with what to do; --force writes over them."""
    config.write_text("mine")
    assert init(*PLAIN) == 2
    assert "exists already: --force overwrites it" in capsys.readouterr().err
    assert config.read_text() == "mine"
    assert init(*PLAIN, "--force") == 0
    assert load_config(config).client_id == "edge-1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--server", "http://a:1"], "leave out the scheme"),
        (["--server", "127.0.0.1:0"], "expected the coordinator's port"),
        (["--client-id", "-x"], "this device's name: expected 1 to 64"),
        (["--device", "tpu"], 'device: expected "auto", "cpu", "cuda" or "cuda:1"'),
        (["--index", "1"], "index needs a partition or a file"),
        (["--option", "data_root"], "expected name=value, got 'data_root'"),
        (["--ca", "ca.crt"], "--insecure excludes --ca, --cert and --key"),
        (["--server", "10.0.0.1:7070"], "plain text to 10.0.0.1:7070, which is not this machine, is refused"),
        (["--metrics-listen", "7080"], "metrics_listen: expected host:port"),
    ],
)
def test_settings_that_the_daemon_refuses_are_not_written(
    init: Init, config: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    """The daemon's own reader checks the file first: one line names the mistake, exit code 2."""
    assert init(*PLAIN, *flags) == 2
    assert words in capsys.readouterr().err
    assert not config.exists()


def test_a_missing_flag_is_an_error(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --yes there are no questions: the message names the missing flag."""
    assert main(["init", "--config", str(config), "--yes", "--task", "digits"]) == 2
    assert "--server is needed: Coordinator, host:port" in capsys.readouterr().err


def test_every_key_is_listed_and_explained(init: Init, config: Path) -> None:
    """Each key of the configuration stands in the file once, used or as a comment, with a line that explains it."""
    init(*PLAIN)
    lines = config.read_text().splitlines()
    fields = {name: field for name, field in ClientConfig.model_fields.items() if f"[{name}]" not in "".join(lines)}
    sections = {"tasks": "[[tasks]]"}
    top = next(number for number, line in enumerate(lines) if line.removeprefix("# ").startswith("["))
    for name in fields:
        if name in sections:
            (at,) = [number for number, line in enumerate(lines) if line == f"# {sections[name]}"]
            assert lines[at - 1].startswith("# "), name
            continue
        (at,) = [number for number, line in enumerate(lines[:top]) if line.removeprefix("# ").startswith(f"{name} =")]
        assert lines[at - 1].startswith("# "), name


def test_a_commented_key_has_its_default(init: Init, config: Path) -> None:
    """With and without the comment signs the settings are equal: each commented value is the default."""
    init(*PLAIN)
    text = config.read_text().replace("# threads =", "threads =").replace("# log =", "log =")
    assert tomllib.loads(text)["threads"] == ClientConfig.model_fields["threads"].default
    assert tomllib.loads(text)["log"] == ClientConfig.model_fields["log"].default


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(value=VALUES)
def test_written_values_are_read_back(value: Any) -> None:
    """Any value, also text with quotes, control characters and line ends, is read back from the TOML unchanged."""
    assert tomllib.loads(f"key = {toml(value)}")["key"] == value


def test_relative_paths_become_absolute(init: Init, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service starts in another directory than the command."""
    monkeypatch.chdir(config.parent)
    init(*PLAIN, "--state-dir", "here", "--shard-folder", "photos")
    assert load_config(config).state_dir == config.parent / "here"
    assert load_config(config).shard.folder == config.parent / "photos"


def test_options_are_numbers_and_words(init: Init, config: Path) -> None:
    """A task's options by name=value, each once more."""
    init(*PLAIN, "--option", "client_eval_fraction=0.2", "--option", "download=true", "--option", "model=a,b")
    assert load_config(config).served[0].options == {"client_eval_fraction": 0.2, "download": True, "model": "a,b"}


class Terminal:
    """A process on its own terminal, with scripted answers."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fl_client", *arguments],
            cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def answer(self, question: str, text: str) -> None:
        """Type once the question is there."""
        self._until(question)
        os.write(self._ours, f"{text}\n".encode())

    def end(self) -> int:
        """The exit code, when everything was shown."""
        self._until(None)
        os.close(self._ours)
        return self._process.wait(TIMEOUT_S)

    def clean_up(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    def _until(self, question: str | None) -> None:
        """Read until the question or the end; earlier output is discarded."""
        while question is None or question not in self.shown:
            readable, _, _ = select.select([self._ours], [], [], TIMEOUT_S)
            assert readable, f"waited for {question!r}, nothing came; before: {self.shown}"
            try:
                more = os.read(self._ours, 4096)
            except OSError:  # the other end of the terminal is closed
                more = b""
            if not more:
                assert question is None, f"ended without asking {question!r}: {self.shown}"
                return
            self.shown += more.decode()
        self.shown = self.shown.partition(question)[2]


@pytest.fixture
def terminal(config: Path) -> Iterator[Terminal]:
    """`fl-client init` on a terminal."""
    terminal = Terminal("init", "--config", config.name, folder=config.parent)
    yield terminal
    terminal.clean_up()


@pytest.mark.slow
def test_all_questions_are_answered(config: Path, plain_server: Coordinator, terminal: Terminal) -> None:
    """On a terminal each question has its answer, one of them after a slip; the file is what was answered."""
    terminal.answer("Coordinator, host:port", "coordinator")
    terminal.answer("expected host:port with a port", plain_server.address)
    terminal.answer("Use TLS", "n")
    terminal.answer("Name of this device", "edge-typed")
    terminal.answer("Task:", TASK)
    terminal.answer("State directory", "")
    terminal.answer("Options of the task", "kept=4")
    terminal.answer("part of the data", "partition")
    terminal.answer("Partition:", "method=iid,clients=2,seed=1")
    terminal.answer("Number of this device's part", "1")
    terminal.answer("Device:", "cpu")
    assert terminal.end() == 0, terminal.shown
    assert "a daemon can work here" in terminal.shown
    written = load_config(config)
    assert (written.client_id, written.device, written.served[0].options) == ("edge-typed", "cpu", {"kept": 4})
    assert written.state_dir == config.parent / "state"
    assert (written.shard.partition, written.shard.index) == ({"method": "iid", "clients": 2, "seed": 1}, 1)


def test_an_interrupted_init_writes_nothing(config: Path, terminal: Terminal) -> None:
    """The terminal is closed at the second question (Ctrl-D): exit code 130 and no file."""
    terminal.answer("Coordinator, host:port", "127.0.0.1:7070")
    terminal.answer("Use TLS", "\x04")
    assert terminal.end() == 130
    assert not config.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["init", "--dirr", "x"], "No such option: --dirr"),
        (["init", "--threads", "many"], "Invalid value for '--threads'"),
        (["doctor", "settings.toml"], "unexpected extra argument"),
        (["unit", "--cores"], "requires an argument"),
    ],
)
def test_a_wrong_command_line_has_a_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and no traceback."""
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_plain_text_over_a_network_needs_a_confirmation(terminal: Terminal) -> None:
    """The default answer is no."""
    terminal.answer("Coordinator, host:port", "10.0.0.1:7070")
    terminal.answer("Use TLS", "n")
    terminal.answer("Name of this device", "edge-1")
    terminal.answer("everyone on the network may read", "")
    assert terminal.end() == 2
    assert "which is not this machine, is refused" in terminal.shown


def test_a_section_that_was_not_chosen_is_a_comment() -> None:
    """The file has [tls] as a comment, which is not read."""
    values = {"client_id": "a", "server": "127.0.0.1:1", "state_dir": "s", "insecure": True, "task": {"name": "digits"}}
    assert "\n# [tls]\n" in settings_text(values)
    assert "tls" not in tomllib.loads(settings_text(values))
