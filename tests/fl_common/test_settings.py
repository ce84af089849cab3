"""Settings files and addresses: accepted values and error messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import SecretStr

from fl_common.settings import Address, Section, SettingsError, is_loopback, read_settings, split_address


class Inner(Section):
    count: int = 1


class Pair(Section):
    left: int
    right: int


class Outer(Section):
    name: str
    mode: Literal["a", "b"] = "a"
    listen: Address | None = None
    inner: Inner | None = None
    pair: Pair | None = None


class Typed(Section):
    flag: bool = False
    count: int = 1
    share: float = 0.5
    path: Path | None = None
    text: str = ""
    secret: SecretStr | None = None
    names: tuple[str, ...] = ()


def read(tmp_path: Path, text: str) -> Outer:
    """The settings of a file with this text."""
    path = tmp_path / "x.toml"
    path.write_text(text)
    return read_settings(path, Outer)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7070", ("127.0.0.1", 7070)),
        ("[::1]:0", ("::1", 0)),
        ("fl.example.org:65535", ("fl.example.org", 65535)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    """Names and numbers, with brackets for IPv6."""
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "x", ":1", "x:", "x:y", "x:65536", "x:-1", "x:1.5", "x: 1"])
def test_what_is_no_address(address: str) -> None:
    """The message has an example and the received value."""
    with pytest.raises(ValueError, match=r'expected host:port with a port up to 65535, such as "127.0.0.1:7070", got'):
        split_address(address)


def test_an_address_has_no_scheme() -> None:
    """A URL has its own message."""
    with pytest.raises(ValueError, match="expected host:port, got 'http://x:1': leave out the scheme"):
        split_address("http://x:1")


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True),
        ("0.0.0.0", False),  # noqa: S104 - only parsed
        ("::", False), ("10.0.0.1", False), ("localhost.example.org", False),
    ],
)  # fmt: skip
def test_this_machine_alone(host: str, here: bool) -> None:
    """All interfaces are not this machine alone, and names are not looked up."""
    assert is_loopback(host) is here


def test_a_file_is_read(tmp_path: Path) -> None:
    """Into values with their types; what is not set has its default."""
    assert read(tmp_path, 'name = "x"\ninner = {count = 3}') == Outer(name="x", inner=Inner(count=3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name: expected a value, found none"),
        ("name = 3", "name: expected text, got 3"),
        ('name = "x"\nnam = 3', "nam: unknown key, did you mean name?"),
        ('name = "x"\nzzz = 3', "zzz: unknown key, expected one of name, mode, listen, inner"),
        ('name = "x"\nmode = "c"', "mode: expected 'a' or 'b', got 'c'"),
        ('name = "x"\nlisten = "x"', "listen: expected host:port"),
        ('name = "x"\n[inner]\ncoun = 1', "inner.coun: unknown key, did you mean count?"),
        ("mode = 3\nzzz = 1", "name: expected a value, found none; mode: expected 'a' or 'b', got 3; zzz: unknown key"),
        ("name = ", "is not TOML: "),
    ],
)
def test_mistakes_are_described(tmp_path: Path, text: str, words: str) -> None:
    """All of them at once, each with its key."""
    with pytest.raises(SettingsError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/x.toml: {words}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a folder, or no text."""
    with pytest.raises(SettingsError, match="x.toml: expected a settings file there, found none"):
        read_settings(tmp_path / "x.toml", Outer)
    with pytest.raises(SettingsError, match="cannot be read: "):
        read_settings(tmp_path, Outer)
    (tmp_path / "y.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"y.toml: is not TOML: expected UTF-8, got another encoding"):
        read_settings(tmp_path / "y.toml", Outer)


def read_two(tmp_path: Path, below: str, above: str) -> Outer:
    """The settings of two files, the second on top of the first."""
    (tmp_path / "below.toml").write_text(below)
    (tmp_path / "above.toml").write_text(above)
    return read_settings(tmp_path / "below.toml", Outer, [tmp_path / "above.toml"])


def test_a_later_file_overrides_an_earlier_one(tmp_path: Path) -> None:
    """Its keys take the place of those below or join them, in tables too; what it leaves out stays."""
    both = read_two(tmp_path, 'name = "x"\nmode = "b"\n', 'name = "y"\n[inner]\ncount = 3\n')
    assert both == Outer(name="y", mode="b", inner=Inner(count=3))
    table = read_two(tmp_path, 'name = "x"\n[inner]\ncount = 3\n', "[inner]\n")
    assert table == Outer(name="x", inner=Inner(count=3))


@pytest.mark.parametrize(
    ("below", "above", "words"),
    [
        ("", 'mode = "b"', "below.toml: name: expected a value, found none"),
        ('name = "x"', 'nam = "y"', "above.toml: nam: unknown key, did you mean name?"),
        ('name = "x"\n[inner]\ncount = 1', "[inner]\ncount = 'x'", "above.toml: inner.count: expected"),
        ("name = 'x'\n[inner]\ncount = 'x'", "[inner]\n", "below.toml: inner.count: expected"),
        ('name = "x"\nmode = "b"', 'mode = "c"', "above.toml: mode: expected 'a' or 'b', got 'c'"),
        ('name = "x"', "[pair]\nleft = 1", "above.toml: pair.right: expected a value, found none"),
        ('name = "x"', "name = ", "above.toml: is not TOML"),
    ],
)
def test_a_mistake_names_the_file_that_has_it(tmp_path: Path, below: str, above: str, words: str) -> None:
    """The uppermost of those that have the key, and the lowest where none has it."""
    with pytest.raises(SettingsError) as error:
        read_two(tmp_path, below, above)
    assert str(error.value).startswith(f"{tmp_path}/{words}")


def test_mistakes_in_two_files_are_reported_together(tmp_path: Path) -> None:
    """Each behind its file's name."""
    with pytest.raises(SettingsError, match=r"below.toml: mode: .*; .*/above.toml: nam: unknown key"):
        read_two(tmp_path, 'name = "x"\nmode = "c"\n', 'nam = "y"\n')


def test_a_file_on_top_must_be_there(tmp_path: Path) -> None:
    """It is named when it is not."""
    (tmp_path / "x.toml").write_text('name = "x"\n')
    with pytest.raises(SettingsError, match="y.toml: expected a settings file there, found none"):
        read_settings(tmp_path / "x.toml", Outer, [tmp_path / "y.toml"])


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("prefix", [b"", BOM])
def test_a_byte_order_mark_is_accepted(tmp_path: Path, prefix: bytes) -> None:
    """As editors on Windows write it."""
    path = tmp_path / "x.toml"
    path.write_bytes(prefix + b'name = "x"\n')
    assert read_settings(path, Outer).name == "x"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ('flag = "yes"', "flag: expected true or false, got 'yes'"),
        ("flag = 1", "flag: expected true or false, got 1"),
        ("count = true", "count: expected a whole number, got True"),
        ('count = "2"', "count: expected a whole number, got '2'"),
        ("count = 2.0", "count: expected a whole number, got 2.0"),
        ("share = true", "share: expected a number, got True"),
        ('share = "0.5"', "share: expected a number, got '0.5'"),
        ("share = inf", "share: expected a finite number, got inf"),
        ("path = 7", "path: expected text, got 7"),
        ("text = 7", "text: expected text, got 7"),
        ("text = 2026-01-01", "expected text in quotes in place of a date or time"),
        ("names = 'a'", "names: expected a list, got 'a'"),
    ],
)
def test_a_value_has_exactly_its_type(tmp_path: Path, values: str, error: str) -> None:
    """Text and numbers are not taken for true and false, nor text, true and false for numbers."""
    path = tmp_path / "x.toml"
    path.write_text(values)
    with pytest.raises(SettingsError, match=re.escape(error)):
        read_settings(path, Typed)


def test_values_of_the_right_types(tmp_path: Path) -> None:
    """A whole number may stand for any number, text for a path and a secret, a list for several."""
    path = tmp_path / "x.toml"
    path.write_text('flag = true\ncount = 2\nshare = 1\npath = "a/b"\ntext = "é"\nsecret = "s"\nnames = ["a"]')
    found = read_settings(path, Typed)
    assert (found.flag, found.count, found.share, found.path) == (True, 2, 1.0, Path("a/b"))
    assert (found.text, found.secret and found.secret.get_secret_value(), found.names) == ("é", "s", ("a",))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            'client_id = "a"\nserver = "h:1"',
            "settings of a daemon, for `fl-client --config`: it has the key 'client_id'",
        ),
        ('admin_listen = "h:1"', "settings of a coordinator, for `fl-server --config`: it has the key 'admin_listen'"),
        ('[algorithm]\nname = "fedcm"', "a run, for `fl run create`: it has the key 'algorithm'"),
    ],
)
def test_the_file_of_another_program_is_named(tmp_path: Path, text: str, kind: str) -> None:
    """In place of a list of unknown keys. A file that has a key of its own kind gets the list."""
    path = tmp_path / "other.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(f"other.toml: this file is {kind}")):
        read_settings(path, Outer)
    path.write_text(f'listen = "127.0.0.1:1"\n{text}')
    with pytest.raises(SettingsError, match=r"name: expected a value, found none; .*unknown key"):
        read_settings(path, Outer)
