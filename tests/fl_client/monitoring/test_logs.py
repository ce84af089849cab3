"""Logs and the status line."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import pytest
import structlog
from rich.console import Console
from rich.status import Status

from fl_client.monitoring import logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_a_log_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, "auto" writes JSON with event, level, time and fields."""
    with logs.logging("auto"):
        structlog.get_logger().info("trained", round=3)
    line = json.loads(capsys.readouterr().out)
    assert (line["event"], line["level"], line["round"]) == ("trained", "info", 3)
    assert "timestamp" in line


def test_an_exception_is_inside_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback does not break the line."""
    with logs.logging("json"):
        try:
            raise ValueError("odd")
        except ValueError:
            structlog.get_logger().exception("work_broken")
    assert "ValueError: odd" in json.loads(capsys.readouterr().out)["exception"]


def test_a_warning_of_a_library_is_a_line_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """It is JSON with its kind and place, and nothing is on stderr."""
    with warnings.catch_warnings(), logs.logging("json"):
        warnings.simplefilter("always")
        warnings.warn("old name", FutureWarning, stacklevel=1)
    written = capfd.readouterr()
    line = json.loads(written.out)
    assert (line["event"], line["level"], line["kind"], line["what"]) == (
        "python_warning", "warning", "FutureWarning", "old name",
    )  # fmt: skip
    assert line["place"].startswith(f"{__file__}:")
    assert written.err == ""


def test_pretty_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """The line shows the event and its fields as plain text."""
    with logs.logging("pretty") as progress:
        progress.show("waiting for work")
        structlog.get_logger().info("trained", round=3)
    assert "trained" in capsys.readouterr().out


def test_the_status_line_shows_brackets_as_they_are() -> None:
    """Text from outside is not interpreted as markup."""
    status = Status("", console=Console(file=None, quiet=True))
    logs.Progress(status).show("[red]run[/blue], round 1")
    assert str(status.status).replace("\\", "") == "[red]run[/blue], round 1"
