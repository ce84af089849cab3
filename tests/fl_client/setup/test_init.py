"""`fl-client init`: by flags and by answers, into a file that explains itself, with which a real daemon works."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_client.__main__ import main
from fl_client.config import ClientConfig, load_config
from fl_client.setup.writing import settings_text, toml
from tests.fl_client.setup.conftest import TASK
from tests.integration.harness import PRESENT
from tests.integration.processes import PATIENCE_S, Place, Process, eventually

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


@pytest.fixture
def config(tmp_path):
    """Where init writes."""
    return tmp_path / "edge-1.toml"


@pytest.fixture
def init(config):
    """Runs init with flags; gives its exit code."""
    return lambda *flags: main(["init", "--config", str(config), *flags])


def attends(place, server, name):
    """Whether a daemon that is started from the place's settings of that name comes to the coordinator."""
    Process(place, name, "fl_client").start()
    eventually(lambda: server.client(name).state == PRESENT, f"{name} attends")
    return True


def test_a_daemon_works_with_what_flags_wrote(init, config, plain_server, capsys):
    """Written, looked at, and found well, exit code 0; then a real daemon attends to the real coordinator with it."""
    shard = ["--partition", "method=iid,clients=3,seed=1", "--index", "2", "--label", "site=north"]
    code = init(
        "--server", plain_server.address, "--insecure", "--client-id", "edge-1", "--task", TASK, *shard, "--yes"
    )
    assert (code, "a daemon can work here" in capsys.readouterr().out) == (0, True)
    with Place(config.parent) as place:
        assert attends(place, plain_server, "edge-1")
    assert plain_server.client("edge-1").labels == {"site": "north"}


def test_a_daemon_works_with_certificates_where_they_lie(init, config, tls_server, site, capsys):
    """With mTLS no flag is needed for files that lie in tls/ beside the settings, by the names of the containers."""
    files = site.issue("client", "edge-1")
    (config.parent / "tls").mkdir()
    for key, name in (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key")):
        (config.parent / "tls" / name).write_bytes(Path(files[key]).read_bytes())
        (config.parent / "tls" / name).chmod(0o600)
    assert init("--server", tls_server.address, "--task", TASK, "--yes") == 0
    assert "0 WARN, 0 FAIL" in capsys.readouterr().out
    with Place(config.parent) as place:
        Process(place, "edge-1", "fl_client").start().logged("registered")


def test_a_device_that_cannot_work_yet_has_its_settings_all_the_same(init, config, capsys):
    """The coordinator is not there: the file is written, exit code 1."""
    assert init(*PLAIN[:-1], "--server", "127.0.0.1:9") == 1
    assert load_config(config).server == "127.0.0.1:9"
    assert "FAIL port" in capsys.readouterr().out


def test_settings_that_are_there_stay(init, config, capsys):
    """Refused with what to do; --force writes over them."""
    config.write_text("mine")
    assert init(*PLAIN) == 2
    assert "is there already: --force writes over it" in capsys.readouterr().err
    assert config.read_text() == "mine"
    assert init(*PLAIN, "--force") == 0
    assert load_config(config).client_id == "edge-1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--server", "http://a:1"], "leave out the scheme"),
        (["--server", "127.0.0.1:0"], "expected the port that the coordinator listens on"),
        (["--client-id", "-x"], "this device's name: expected 1 to 64"),
        (["--device", "tpu"], 'device: expected "auto", "cpu", "cuda" or "cuda:1"'),
        (["--index", "1"], "index needs a partition or a file"),
        (["--option", "data_root"], "expected name=value, got 'data_root'"),
        (["--ca", "ca.crt"], "--insecure means no certificates"),
        (["--server", "10.0.0.1:7070"], "plain text to 10.0.0.1:7070, which is not this machine, is refused"),
        (["--metrics-listen", "7080"], "metrics_listen: expected host:port"),
    ],
)
def test_what_the_daemon_would_not_take_is_not_written(init, config, capsys, flags, words):
    """The daemon's own reader looks at the file first: one line says what is wrong, exit code 2."""
    assert init(*PLAIN, *flags) == 2
    assert words in capsys.readouterr().err
    assert not config.exists()


def test_what_cannot_be_guessed_must_be_said(config, capsys):
    """With --yes nobody is asked: the missing flag is named."""
    assert main(["init", "--config", str(config), "--yes", "--task", "digits"]) == 2
    assert "--server is needed: Coordinator, host:port" in capsys.readouterr().err


def test_every_key_is_there_and_explained(init, config):
    """Each key of the configuration stands in the file once, used or as a comment, with a line that explains it."""
    init(*PLAIN)
    lines = config.read_text().splitlines()
    fields = {name: field for name, field in ClientConfig.model_fields.items() if f"[{name}]" not in "".join(lines)}
    for name in fields:
        (at,) = [number for number, line in enumerate(lines) if line.removeprefix("# ").startswith(f"{name} =")]
        assert lines[at - 1].startswith("# "), name


def test_a_key_that_nobody_chose_changes_nothing(init, config):
    """Read with and without the comments' signs, defaults are defaults: what stands behind # is what holds anyway."""
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
def test_what_is_written_is_read_again(value):
    """Any value, with quotes, controls and line ends in its texts, comes back from the TOML as it was."""
    assert tomllib.loads(f"key = {toml(value)}")["key"] == value


def test_relative_paths_become_absolute(init, config, monkeypatch):
    """A service starts elsewhere than where somebody typed."""
    monkeypatch.chdir(config.parent)
    init(*PLAIN, "--state-dir", "here", "--shard-folder", "photos")
    assert load_config(config).state_dir == config.parent / "here"
    assert load_config(config).shard.folder == config.parent / "photos"


def test_options_are_numbers_and_words(init, config):
    """A task's options by name=value, each once more."""
    init(*PLAIN, "--option", "client_eval_fraction=0.2", "--option", "download=true", "--option", "model=a,b")
    assert load_config(config).task.options == {"client_eval_fraction": 0.2, "download": True, "model": "a,b"}


class Terminal:
    """A process on a terminal of its own, and somebody who types when asked."""

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
        return self._process.wait(PATIENCE_S)

    def clean_up(self) -> None:
        """It ends here, whatever it waits for."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def _until(self, question: str | None) -> None:
        """Read until the question, or the end; what was shown before it is done with."""
        while question is None or question not in self.shown:
            readable, _, _ = select.select([self._ours], [], [], PATIENCE_S)
            assert readable, f"waited for {question!r}, nothing came; before: {self.shown}"
            try:
                more = os.read(self._ours, 4096)
            except OSError:  # the terminal's other end is closed
                more = b""
            if not more:
                assert question is None, f"ended without asking {question!r}: {self.shown}"
                return
            self.shown += more.decode()
        self.shown = self.shown.partition(question)[2]


@pytest.fixture
def terminal(config):
    """`fl-client init` on a terminal."""
    terminal = Terminal("init", "--config", config.name, folder=config.parent)
    yield terminal
    terminal.clean_up()


def test_somebody_answers(config, plain_server, terminal):
    """On a terminal each question has its answer, one of them after a slip; the file is what was answered."""
    terminal.answer("Coordinator, host:port", "coordinator")
    terminal.answer("expected host:port with a port", plain_server.address)
    terminal.answer("Speak TLS", "n")
    terminal.answer("Name of this device", "edge-typed")
    terminal.answer("Task:", TASK)
    terminal.answer("State directory", "")
    terminal.answer("Options of the task", "kept=4")
    terminal.answer("part of the data", "partition")
    terminal.answer("Partition,", "method=iid,clients=2,seed=1")
    terminal.answer("Which client's part", "1")
    terminal.answer("Device:", "cpu")
    assert terminal.end() == 0, terminal.shown
    assert "a daemon can work here" in terminal.shown
    written = load_config(config)
    assert (written.client_id, written.device, written.task.options) == ("edge-typed", "cpu", {"kept": 4})
    assert written.state_dir == config.parent / "state"
    assert (written.shard.partition, written.shard.index) == ({"method": "iid", "clients": 2, "seed": 1}, 1)


def test_whoever_goes_away_has_written_nothing(config, terminal):
    """The terminal is closed at the second question (Ctrl-D): exit code 130 and no file."""
    terminal.answer("Coordinator, host:port", "127.0.0.1:7070")
    terminal.answer("Speak TLS", "\x04")
    assert terminal.end() == 130
    assert not config.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init", "--dirr", "x"], "No such option: --dirr"),
        (["init", "--threads", "many"], "Invalid value for '--threads'"),
        (["doctor", "settings.toml"], "unexpected extra argument"),
        (["unit", "--cores"], "requires an argument"),
    ],
)
def test_a_wrong_command_line_is_told_in_words(words, said, capsys):
    """Exit code 2, and no traceback."""
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_plain_text_over_a_network_wants_a_second_yes(terminal):
    """Nobody slips into it: the answer is no unless it is typed."""
    terminal.answer("Coordinator, host:port", "10.0.0.1:7070")
    terminal.answer("Speak TLS", "n")
    terminal.answer("Name of this device", "edge-1")
    terminal.answer("everyone on the network may read", "")
    assert terminal.end() == 2
    assert "which is not this machine, is refused" in terminal.shown


def test_a_section_that_was_not_chosen_is_a_comment():
    """[tls] stands there for whoever needs it later, and is not read."""
    values = {"client_id": "a", "server": "127.0.0.1:1", "state_dir": "s", "insecure": True, "task": {"name": "digits"}}
    assert "\n# [tls]\n" in settings_text(values)
    assert "tls" not in tomllib.loads(settings_text(values))
