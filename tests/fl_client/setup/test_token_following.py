"""A device that follows its token file: which tokens it uses, and when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fl_client.errors import UsageError
from fl_client.setup import enrolling
from fl_client.setup.enrolling import EnrollFlags, Target, follow_token, target_of
from fl_client.setup.flags import DaemonFlags, TokenFlags


class _Stopped(Exception):
    """Ends the loop in place of a signal."""


def following(tmp_path: Path, token_file: Path | None) -> tuple[EnrollFlags, Target]:
    """The options of `fl-client init --follow-token`, with a folder for the certificate."""
    flags = EnrollFlags(TokenFlags(token_file=tmp_path / "token"), DaemonFlags("127.0.0.1:9", state_dir=tmp_path))
    target = target_of(flags, tmp_path / "client.toml", only_certificate=True)
    return replace(flags, token=TokenFlags(token_file=token_file)), target


def test_a_new_token_is_used_at_once_while_the_one_before_waits_for_its_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token cannot be used, so its next try is later; the clock stands still."""
    file = tmp_path / "token"
    file.write_text("first", encoding="utf-8")
    flags, target = following(tmp_path, file)
    tried: list[str] = []
    later = iter(["first", "second", "second"])

    def fails(flags: EnrollFlags, _target: Target) -> bool:
        tried.append(enrolling._content(file))
        return False

    def sleep(_seconds: float) -> None:
        content = next(later, None)
        if content is None:
            raise _Stopped
        file.write_text(content, encoding="utf-8")

    monkeypatch.setattr(enrolling, "_is_done", fails)
    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(_Stopped):
        follow_token(flags, target)
    assert tried == ["first", "second"]


@pytest.mark.parametrize("token_file", [None, Path("-")])
def test_without_a_file_it_says_what_is_missing(tmp_path: Path, token_file: Path | None) -> None:
    """Standard input has no later content."""
    flags, target = following(tmp_path, token_file)
    with pytest.raises(UsageError, match="--follow-token needs --token-file FILE"):
        follow_token(flags, target)
