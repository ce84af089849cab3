"""The policy file: what it may contain, and the errors of one that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_client.errors import ConfigError
from fl_client.policy.config import NO_POLICY, Policy, read_policy

HEX = "ab" * 32


def written(folder: Path, text: str, mode: int = 0o644) -> Path:
    """A policy file."""
    path = folder / "policy.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_an_empty_file_has_the_floors_and_refuses_unknown_demands(tmp_path: Path) -> None:
    """Its other rules are those of a device without a policy."""
    found = read_policy(written(tmp_path, ""))
    assert found.work.model_dump(exclude_none=True) == {
        "min_batch_size": 4, "min_examples": 16, "min_steps": 1, "min_clients": 3,
    }  # fmt: skip
    assert found == NO_POLICY.model_copy(update={"allow_unknown_demands": False, "work": found.work})


@pytest.mark.parametrize(
    "shown", [HEX, HEX.upper(), "sha256:" + HEX, "SHA256 Fingerprint=" + ":".join(["AB"] * 32)],
    ids=["hex", "upper", "prefixed", "openssl"],
)  # fmt: skip
def test_fingerprints_are_read_as_tools_print_them(tmp_path: Path, shown: str) -> None:
    """Hex digits in either case, with colons or a prefix, mean the same."""
    policy = read_policy(written(tmp_path, f'[coordinators]\nca_sha256 = ["{shown}"]'))
    assert policy.coordinators.ca_sha256 == [HEX]
    policy = read_policy(written(tmp_path, f'[tasks.fingerprints]\ndigits = ["{shown}"]'))
    assert policy.tasks.fingerprints == {"digits": [f"sha256:{HEX}"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[task]\nallow = []", "task: unknown key, did you mean tasks?"),
        ("[tasks]\nalow = []", "tasks.alow: unknown key, did you mean allow?"),
        ("[work]\nmax_epochs = 0", "work.max_epochs: expected greater than or equal to 1, got 0"),
        ("[day]\nmax_seconds = nan", "day.max_seconds: expected a finite number"),
        ("[day]\nmax_bytes_up = -1", "day.max_bytes_up: expected greater than or equal to 1, got -1"),
        ('[coordinators]\nca_sha256 = ["12"]', "expected a SHA-256 fingerprint of 64 hex digits"),
        ('[hours]\nwindows = ["late"]', 'expected a window such as "22:00-06:00"'),
        ('[hours]\ntimezone = "Mars"', "expected a time zone"),
        ("[privacy]\nmax_epsilon = 0", "privacy.max_epsilon: expected greater than 0, got 0"),
        ("tasks = 3", "tasks: expected a table"),
        ("[tasks", "is not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, expected: str) -> None:
    """The error has the file, the key, what was expected and what came. An unknown key is an error."""
    with pytest.raises(ConfigError) as caught:
        read_policy(written(tmp_path, text))
    assert str(tmp_path / "policy.toml") in str(caught.value)
    assert expected in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A policy that is named and missing must not mean that everything is allowed."""
    with pytest.raises(ConfigError, match="expected a settings file there, found none"):
        read_policy(tmp_path / "policy.toml")


def test_a_file_that_everyone_can_change_is_refused(tmp_path: Path) -> None:
    """The rules are the site's own. A group may write: it can be the site's administrators."""
    with pytest.raises(ConfigError, match="mode 0646: chmod o-w"):
        read_policy(written(tmp_path, "", 0o646))
    assert read_policy(written(tmp_path, "", 0o664)) == Policy()
