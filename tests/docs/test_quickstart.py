"""docs/quickstart.md, done as its reader does it: real processes, in the page's order, in an empty folder."""

from __future__ import annotations

import pytest

from tests.docs.pages import Command, File, follow_page, missing, read_page, steps

PAGE = read_page("docs/quickstart.md")


@pytest.mark.timeout(600)  # some sixty commands, on a machine that may be busy with others
def test_everything_on_the_page_works(tmp_path):
    """Each file is saved, each command run; exit codes and the words beside the commands are as the page has them."""
    follow_page(PAGE, tmp_path / "work")


def test_no_block_of_the_page_is_left_out():
    """Each fenced block is a file or commands: nothing on the page is there only to be looked at."""
    kinds = [line for line in PAGE.splitlines() if line.startswith("```") and line != "```"]
    assert set(kinds) == {"```toml", "```python", "```console"}
    assert len([step for step in steps(PAGE) if isinstance(step, File)]) == PAGE.count("```toml") + PAGE.count(
        "```python"
    )


def test_a_block_is_read_as_files_and_commands():
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
def test_what_is_shown_must_be_printed_in_that_order(shown, absent):
    """Blanks count as one, dots stand for any text, and a line that was not printed in its turn is named."""
    assert missing(shown, "one   two\nthree four\n") == absent
