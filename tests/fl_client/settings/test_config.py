"""Every mistake in a configuration has a message that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_client.__main__ import CANNOT_START, main
from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig, load_config
from fl_client.settings.identity import identity_of

GOOD = """
client_id = "edge-3"
server = "127.0.0.1:7070"
state_dir = "state"
insecure = true
labels = {site = "north"}
metrics_listen = ""
[task]
name = "digits"
[shard]
partition = {method = "dirichlet", clients = 8, alpha = 0.1, seed = 1}
index = 3
"""


def load(tmp_path: Path, text: str) -> ClientConfig:
    """The configuration of a file with this text."""
    path = tmp_path / "client.toml"
    path.write_text(text)
    return load_config(path)


def test_a_whole_configuration_is_read(tmp_path: Path) -> None:
    """Every key is read, an empty metrics_listen counts as none, and defaults apply."""
    config = load(tmp_path, GOOD)
    assert (config.device, config.threads, config.metrics_listen, config.shard.index) == ("auto", 1, None, 3)
    assert identity_of(config) == "edge-3"


SEVERAL = (
    GOOD.partition("[task]")[0]
    + """
[[tasks]]
name = "digits"
data = "north"
labels = {site = "north"}
shard = {folder = "north"}
[[tasks]]
name = "digits"
data = "south"
shard = {folder = "south"}
"""
)


def test_several_tasks_are_read(tmp_path: Path) -> None:
    """Each has its data and its labels; the single form is one task without a name of its data."""
    one, several = load(tmp_path, GOOD).served, load(tmp_path, SEVERAL).served
    assert [served.title for served in (*one, *several)] == ["digits", "digits@north", "digits@south"]
    assert (one[0].shard.index, several[0].labels) == (3, {"site": "north"})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        pytest.param('"south"\nshard', '"north"\nshard', "expected another `data` for each task 'digits'", id="twice"),
        pytest.param('folder = "south"', 'folder = "north"', "expected one name for the same data", id="same"),
        pytest.param('data = "south"', 'data = "../x"', "tasks.1.data: data: expected 1 to 64 of", id="path"),
        pytest.param("[[tasks]]", "processes = 2\n[[tasks]]", "processes: expected 1 with several tasks", id="ranks"),
    ],
)
def test_tasks_that_cannot_be_kept_apart_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    """Two tasks of one name with one data, one folder under two names, and processes that train one task together."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, SEVERAL.replace(old, new, 1))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "[task]",
            '[[tasks]]\nname = "digits"\n[task]',
            "expected a table [task], or tables [[tasks]] for several, got both",
        ),
        ('[task]\nname = "digits"', "", "expected a table [task], or tables [[tasks]] for several, got neither"),
        ("[task]", "[[tasks]]", "shard: expected it inside of each of [[tasks]]"),
        ("insecure =", "insecur =", "insecur: unknown key, did you mean insecure?"),
        ('name = "digits"', 'name = "digits"\nrounds = 3', "task.rounds: unknown key, expected one of name, options"),
        ('server = "127.0.0.1:7070"', "", "server: expected a value, found none"),
        ("127.0.0.1:7070", "http://127.0.0.1:7070", "server: expected host:port, got 'http://127.0.0.1:7070'"),
        ("127.0.0.1:7070", "127.0.0.1", "server: expected host:port with a port up to 65535"),
        ("127.0.0.1:7070", "127.0.0.1:0", "server: expected the coordinator's port"),
        ("127.0.0.1:7070", "10.1.2.3:7070", "insecure_remote = true"),
        ("insecure = true", "", "for plain text set insecure = true"),
        ("insecure = true", "insecure = 7", "insecure: expected"),
        ('client_id = "edge-3"', "", "client_id: expected a name for this device"),
        ("edge-3", "edge 3", "client_id: this device's name: expected 1 to 64 of"),
        ("[task]", "processes = 0\n[task]", 'processes: expected a whole number from 1 to 64, or "auto", got 0'),
        ("[task]", 'device = "gpu"\n[task]', 'device: expected "auto", "cpu", "cuda" or "cuda:1", got \'gpu\''),
        (
            "[task]",
            'precision = "float8"\n[task]',
            "precision: expected 'float32', 'bfloat16' or 'float16', got 'float8'",
        ),
        (
            "[task]",
            'memory_format = "nhwc"\n[task]',
            "memory_format: expected 'auto', 'contiguous' or 'channels_last', got 'nhwc'",
        ),
        ("[task]", "threads = 0\n[task]", "threads: expected greater than or equal to 1, got 0"),
        ("[task]", 'log = "loud"\n[task]', "log: expected 'auto', 'json' or 'pretty', got 'loud'"),
        ("index = 3", "", "partition needs an index"),
        ("index = 3", 'index = 3\nfolder = "x"', "expected one of partition, file, indices, folder and query"),
        ("partition = {", "p = {", "shard.p: unknown key"),
        ("[task]", '[tls]\nca = "a"\ncert = "b"\nkey = "c"\n[task]', "insecure and [tls] contradict each other"),
        ("[task]", '[gates]\nwindows = ["22-6"]\n[task]', "gates.windows.0: expected a window such as"),
        ("[task]", '[gates]\ntimezone = "Mars"\n[task]', "gates.timezone: expected a time zone such as"),
        (
            "[task]",
            '[gates]\ntimezone = "UTC"\n[task]',
            "gates: timezone is the time zone of windows, and there are none",
        ),
        ("[task]", '[gates]\ntemperature_zones = ["cpu"]\n[task]', "temperature_zones needs temperature_below"),
        ("[task]", "[gates]\ngpu_below = 20\n[task]", "gates.gpu_below: expected less than or equal to 1, got 20"),
        (
            "[task]",
            '[gates]\nfinish = ["windows"]\n[task]',
            "gates.finish.0: expected 'window', 'gpu', 'power' or 'temperature', got 'windows'",
        ),
        ("[task]", "[gates]\nmains = true\n[task]", "gates.mains: unknown key, did you mean on_mains?"),
        ("[task]", "[task", "is not TOML"),
    ],
)
def test_a_mistake_has_a_message(tmp_path: Path, old: str, new: str, words: str) -> None:
    """The message names the key, what was expected and what came."""
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert words in str(caught.value)
    assert "client.toml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """No file: the message names its path."""
    with pytest.raises(ConfigError, match=r"nothing\.toml: expected a settings file there"):
        load_config(tmp_path / "nothing.toml")


def test_plain_text_over_a_network_can_be_asked_for_by_two_names(tmp_path: Path) -> None:
    """insecure and insecure_remote together are accepted."""
    text = GOOD.replace("127.0.0.1:7070", "10.1.2.3:7070").replace(
        "insecure = true", "insecure = true\ninsecure_remote = true"
    )
    assert load(tmp_path, text).server == "10.1.2.3:7070"


def test_two_mistakes_are_both_reported(tmp_path: Path) -> None:
    """One start reports every mistake."""
    with pytest.raises(ConfigError, match=r"(?s)device: .*; threads: "):
        load(tmp_path, GOOD.replace("[task]", 'device = "gpu"\nthreads = 0\n[task]'))


def test_the_switches_of_a_partition_stay_switches(tmp_path: Path) -> None:
    """true and false are not converted to 1 and 0, nor 2 to true, because the stored shard is compared with them."""
    text = GOOD.replace("seed = 1}", "seed = 1, rotate = true, classes = 2, sigma = 0.5}")
    fields = load(tmp_path, text).shard.partition
    assert fields is not None
    assert [fields[name] for name in ("rotate", "classes", "sigma")] == [True, 2, 0.5]
    assert [type(fields[name]) for name in ("rotate", "classes", "sigma")] == [bool, int, float]


def test_a_second_file_has_the_settings_of_one_device(tmp_path: Path) -> None:
    """Name and index of the second file and the partition of the first form one configuration."""
    (tmp_path / "all.toml").write_text(GOOD.replace('client_id = "edge-3"', "").replace("index = 3", ""))
    (tmp_path / "own.toml").write_text('client_id = "edge-5"\n[shard]\nindex = 5\n')
    config = load_config(tmp_path / "all.toml", [tmp_path / "own.toml"])
    assert (identity_of(config), config.shard.index) == ("edge-5", 5)
    assert config.shard.partition == {"method": "dirichlet", "clients": 8, "alpha": 0.1, "seed": 1}


def test_the_command_takes_a_second_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--config` twice: the message names the second file, so both are read."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # keep the signal handlers of pytest's process
    (tmp_path / "all.toml").write_text(GOOD)
    (tmp_path / "own.toml").write_text("threads = 0\n")
    assert main(["--config", f"{tmp_path}/all.toml", "--config", f"{tmp_path}/own.toml"]) == CANNOT_START
    assert "own.toml: threads: expected greater than or equal to 1, got 0" in capsys.readouterr().err
