"""Where `fl` finds its coordinator, and what it refuses to send in plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_ops.admin.settings import (
    Certificates,
    Connection,
    Layer,
    Token,
    file_path,
    from_environment,
    from_file,
    resolve,
)
from fl_ops.errors import UsageError
from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl

CA, CERT, KEY = Path("ca.crt"), Path("a.crt"), Path("a.key")
PLAIN = Layer(insecure=True)


def test_strongest_layer_wins() -> None:
    """A flag beats the environment, which beats the file, key by key."""
    file = Layer(server="file:1", ca=CA, cert=CERT, key=Path("file.key"))
    environment = from_environment({"FL_ADMIN": "environment:2", "FL_KEY": "environment.key"})
    flags = Layer(server="flag:3")
    assert resolve([flags, environment, file]) == Connection("flag:3", Certificates(CA, CERT, Path("environment.key")))


def test_default_server() -> None:
    """Without an address it is the local coordinator's admin port."""
    assert resolve([PLAIN]) == Connection("127.0.0.1:7071")


def test_stronger_plain_text_beats_weaker_certificates() -> None:
    """--insecure on the command line sets aside the certificates of the settings file."""
    assert resolve([PLAIN, Layer(ca=CA, cert=CERT, key=KEY)]) == Connection("127.0.0.1:7071")


def test_stronger_certificates_beat_weaker_plain_text() -> None:
    """Certificates on the command line set aside the environment's FL_INSECURE."""
    assert resolve([Layer(ca=CA, cert=CERT, key=KEY), PLAIN]).security == Certificates(CA, CERT, KEY)


@pytest.mark.parametrize("server", ["localhost:1", "127.0.0.9:1", "[::1]:1"])
def test_plain_text_on_this_machine(server: str) -> None:
    """Plain text is allowed to loopback addresses."""
    assert resolve([PLAIN, Layer(server=server)]).security is None


@pytest.mark.parametrize("server", ["10.0.0.1:1", "fl.example.org:1", "localhost.example.org:1", "[::]:1"])
def test_plain_text_elsewhere(server: str) -> None:
    """Plain text to another machine is refused unless it is asked for by its second name too."""
    with pytest.raises(UsageError, match="--insecure-remote"):
        resolve([PLAIN, Layer(server=server)])
    assert resolve([Layer(insecure=True, insecure_remote=True, server=server)]).security is None


def test_remote_alone_is_not_plain_text() -> None:
    """--insecure-remote without --insecure still asks for certificates."""
    with pytest.raises(UsageError, match="missing: --ca, --cert, --key"):
        resolve([Layer(insecure_remote=True)])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([Layer()], "missing: --ca, --cert, --key"),
        ([Layer(ca=CA)], "missing: --cert, --key"),
        ([Layer(ca=CA, insecure=True)], "--insecure means no certificates and no token, but --ca"),
        ([Layer(server="host"), PLAIN], "HOST:PORT"),
        ([Layer(server="host:99999"), PLAIN], "HOST:PORT"),
        ([Layer(server=":7071"), PLAIN], "HOST:PORT"),
    ],
)
def test_contradictions(layers: list[Layer], expected: str) -> None:
    """What does not make a connection is refused with what is missing or in conflict."""
    with pytest.raises(UsageError, match=expected):
        resolve(layers)


def test_environment_truth() -> None:
    """FL_INSECURE takes 1 and 0; anything else is named."""
    assert from_environment({"FL_INSECURE": "0"}).insecure is False
    with pytest.raises(UsageError, match="FL_INSECURE: expected 1 or 0, got 'maybe'"):
        from_environment({"FL_INSECURE": "maybe"})


def test_file(tmp_path: Path) -> None:
    """Relative paths in the settings file count from its folder."""
    file = tmp_path / "fl.toml"
    file.write_text('server = "a:1"\nca = "pki/ca.crt"\ninsecure = false\n')
    assert from_file(file) == Layer(server="a:1", ca=tmp_path / "pki/ca.crt", insecure=False)


def test_no_file(tmp_path: Path) -> None:
    """The settings file is optional."""
    assert from_file(tmp_path / "fl.toml") == Layer()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("servr = 1", "unknown key 'servr'; known: server, ca"),
        ("server = 1", "server: expected text, got 1"),
        ('insecure = "yes"', "insecure: expected true or false"),
        ("server", "cannot be read as TOML"),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, expected: str) -> None:
    """A wrong settings file is named together with the key."""
    file = tmp_path / "fl.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=rf"fl\.toml.*{expected}"):
        from_file(file)


def test_place_of_the_file(admin: FakeAdmin, fl: Fl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`fl` reads impetus/fl.toml in the user's configuration folder."""
    monkeypatch.delenv("FL_INSECURE")
    path = file_path({"XDG_CONFIG_HOME": str(tmp_path / "config")})
    path.parent.mkdir(parents=True)
    path.write_text("ca = 3")
    assert "fl.toml: ca: expected text, got 3" in fl("run", "list").stderr
    assert admin.requests == []


def test_a_token_in_place_of_a_certificate() -> None:
    """From a file or from the environment, with the authority of the coordinator's certificate."""
    file, variable = Layer(token_file=Path("t")), from_environment({"FL_TOKEN": "abc", "FL_CA": "ca.crt"})
    assert resolve([file, Layer(ca=CA)]) == Connection("127.0.0.1:7071", Token(CA, Path("t")))
    assert resolve([variable]).security == Token(CA, text="abc")
    assert resolve([Layer(ca=CA, cert=CERT, key=KEY), variable]).security == Certificates(CA, CERT, KEY)
    assert resolve([file, Layer(ca=CA, cert=CERT, key=KEY)]).security == Token(CA, Path("t"))
    assert resolve([PLAIN, variable]).security is None  # never sent in plain text
    assert isinstance(from_environment({"FL_TOKEN_FILE": "t"}).token_file, Path)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer(ca=CA, token="secret", token_file=Path("t")), "got --token-file, FL_TOKEN: remove all but one"),
        (Layer(ca=CA, token="secret", cert=CERT), "expected a certificate or one token, got --cert, FL_TOKEN"),
        (Layer(token="secret"), "--ca: expected the authority of the coordinator's certificate with a token"),
        (Layer(token="secret", insecure=True), "--insecure means no certificates and no token, but FL_TOKEN is set"),
    ],
)
def test_a_token_and_something_else(layer: Layer, message: str) -> None:
    """The message names the options and never has the token."""
    with pytest.raises(UsageError, match=message) as refused:
        resolve([layer])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("text", ["", " \n", "two words", "a\nb", "x" * 8001, "\u00e9"])
def test_a_file_without_a_token(tmp_path: Path, text: str) -> None:
    """The message names the file, and never has its content."""
    file = tmp_path / "token"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(UsageError, match=f"--token-file {file}: expected a token") as refused:
        Token(CA, file).read()
    assert text.strip() not in str(refused.value).replace(str(file), "") or not text.strip()


def test_a_token_is_not_in_a_repr() -> None:
    """Layers, connections and tokens can be logged."""
    shown = repr((Layer(token="secret"), Connection("a:1", Token(CA, text="secret"))))
    assert "secret" not in shown


def test_a_token_is_no_key_of_the_file(tmp_path: Path) -> None:
    """A settings file is not for secrets."""
    (tmp_path / "fl.toml").write_text('token = "secret"')
    with pytest.raises(UsageError, match="unknown key 'token'; known: .*token_file"):
        from_file(tmp_path / "fl.toml")


def test_the_leader_of_several_addresses(admin: FakeAdmin) -> None:
    """The first whose port is open: a standby has closed it. If none is open it is the first, whose error is shown."""
    closed = "127.0.0.1:1"
    assert resolve([PLAIN, Layer(server=f"{closed}, {admin.address}")]).server == admin.address
    assert resolve([PLAIN, Layer(server=f"{admin.address},{closed}")]).server == admin.address
    assert resolve([PLAIN, Layer(server=f"{closed},127.0.0.1:2")]).server == closed


def test_a_command_goes_on_at_the_address_that_leads(admin: FakeAdmin, fl: Fl, monkeypatch: pytest.MonkeyPatch) -> None:
    """FL_ADMIN has both; the one that does not answer is passed over."""
    monkeypatch.setenv("FL_ADMIN", f"127.0.0.1:1,{admin.address}")
    admin.responses["ListRuns"] = admin_pb2.ListRunsResponse()
    assert "no runs yet" in fl("run", "list").stdout
