"""docs/start/quickstart.md is executed with real processes, in the page's order, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Command, File, follow_page, missing, read_page, steps

PAGE = read_page("docs/start/quickstart.md")


@pytest.mark.slow
@pytest.mark.timeout(600)  # some sixty commands, on a machine that may be busy with others
def test_everything_on_the_page_works(tmp_path: Path) -> None:
    """Each file is saved and each command run; exit codes and outputs are those of the page."""
    follow_page(PAGE, tmp_path / "work")


def test_a_site_with_certificates_and_two_devices_needs_ten_commands() -> None:
    """From the authority to the end of the first run, by the number of commands between them."""
    commands = [step.text for step in steps(PAGE) if isinstance(step, Command)]
    first = next(number for number, text in enumerate(commands) if text.startswith("fl ca init"))
    last = commands.index("fl run create secure.toml --watch")
    assert last - first + 1 == 10


def test_no_block_of_the_page_is_left_out() -> None:
    """Each fenced block is a file or commands, so the test executes all of them."""
    kinds = [line for line in PAGE.splitlines() if line.startswith("```") and line != "```"]
    assert set(kinds) == {"```toml", "```python", "```console"}
    assert len([step for step in steps(PAGE) if isinstance(step, File)]) == PAGE.count("```toml") + PAGE.count(
        "```python"
    )


def test_a_block_is_read_as_files_and_commands() -> None:
    """A comment in the first line names a file; commands begin with a dollar, and what they print stands below."""
    page = "```toml\n# a.toml\nx = 1\n```\n\n```console\n$ ls\na.toml\n$ echo $?\n0\n```\n"
    assert list(steps(page)) == [
        File("a.toml", "# a.toml\nx = 1\n"),
        Command("ls", ("a.toml",)),
        Command("echo $?", ("0",)),
    ]


@pytest.mark.parametrize(
    ("shown", "absent"),
    [(("one two",), None), (("one ... three", "four"), None), (("two", "one"), "one"), (("one four",), "one four")],
)
def test_shown_lines_must_be_printed_in_order(shown: tuple[str, ...], absent: str | None) -> None:
    """Blanks count as one, dots stand for any text, and a line that was not printed in its turn is named."""
    assert missing(shown, "one   two\nthree four\n") == absent
