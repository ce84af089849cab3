"""Every command line of `fl`, `fl-server` and `fl-client` on our pages, and in our messages, is one that exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from click import ClickException

from fl_client.setup.commands import app as setup_app
from fl_ops.commands.cli import app
from tests.docs.pages import (
    DOCS,
    ROOT,
    check_fl_client_command,
    check_fl_command,
    check_fl_server_command,
    commands_of,
    read_page,
)

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "k8s/README.md",
    "k8s/production.md",
    "k8s/operate.md",
    *DOCS,
]
SOURCES = [
    path
    for folder in (
        *("fl_server", "fl_client", "fl_ops", "fl_common", "algorithms", "fl_extensions", "fl_tasks", "protos", "k8s"),
    )
    for kind in ("*.py", "*.proto", "*.yaml", "*.json")
    for path in (ROOT / folder).rglob(kind)
    if "_pb2" not in path.name
]
CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "fl": check_fl_command,
    "fl-client": check_fl_client_command,
    "fl-server": check_fl_server_command,
}
START = re.compile(r"^(?:\$ |\w+=\S+ )*(?:kubectl .* -- )?(fl|fl-client|fl-server) (.*)$")
MENTION = re.compile(r"`(fl|fl-client|fl-server) ([a-z-][^`\n]*)`")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(program, arguments) of the lines in shell blocks; a line that ends with a backslash goes on in the next one."""
    for body in re.findall(r"^ *```(?:sh|console|bash|shell)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        for line in body.replace("\\\n", " ").splitlines():
            for part in re.split(r"\||&&|;|(?<= )&|>|(?<!-)#", line):
                if found := START.match(part.strip()):
                    yield found[1], found[2]


def mentions(text: str) -> Iterator[tuple[str, str]]:
    """(program, arguments) in running text and in messages."""
    yield from MENTION.findall(text)


def check_mention(program: str, arguments: str) -> None:
    """Fail unless the command exists, and each of its options. Arguments may be missing or names such as RUN."""
    words = arguments.replace("{", "").replace("}", "").split()
    if program == "fl-server" or (program == "fl-client" and words[0] in {"run", "--config", "--version"}):
        assert words[0] in {"check", "backup", "restore", "run", "--config", "--role", "--version", "--help"}, (
            f"{program} {arguments}"
        )
        return
    command: Any = commands_of(app if program == "fl" else setup_app)
    while commands := getattr(command, "commands", None):
        if not words or words[0] == "..." or words[0].startswith("--"):
            return
        assert words[0] in commands, f"{program} {arguments}: not one of {list(commands)}"
        command = commands[words.pop(0)]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    options = {word.partition("=")[0].rstrip(".,:") for word in words if word.startswith("-") and word != "-"}
    assert options <= known, f"{program} {arguments}: expected options of {sorted(known)}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(page: str) -> None:
    """Lines in blocks are taken with all their arguments; in the text the command and its options exist."""
    text = read_page(page)
    wrong = [refusal(CHECKS[program], shlex.split(arguments)) for program, arguments in blocks(text)]
    wrong += [refusal(check_mention, program, arguments) for program, arguments in mentions(text)]
    assert [problem for problem in wrong if problem] == []


def refusal(check: Callable[..., None], *arguments: Any) -> str:
    """Why a check refuses a command line; empty if it does not."""
    try:
        check(*arguments)
    except (AssertionError, ClickException, SystemExit) as error:
        return f"{arguments}: {error}"
    return ""


def test_commands_in_messages() -> None:
    """An error that advises a command advises one that exists."""
    found = [(source, mention) for source in SOURCES for mention in mentions(source.read_text(encoding="utf-8"))]
    wrong = [(path.relative_to(ROOT), refusal(check_mention, *mention)) for path, mention in found]
    assert [problem for problem in wrong if problem[1]] == []
    assert len(found) > 60


def test_the_pages_have_commands() -> None:
    """Without this, an expression that finds nothing would pass the tests above."""
    texts = [read_page(page) for page in PAGES]
    assert len([line for text in texts for line in blocks(text)]) > 60
    assert len([mention for text in texts for mention in mentions(text)]) > 60


@pytest.mark.parametrize("wrong", ["client ban a", "clients bann a", "run show a --detail", "clients ban a"])
def test_a_wrong_command_is_found(wrong: str) -> None:
    """A word, an option or a missing option."""
    with pytest.raises((AssertionError, Exception), match=r"not one of|[Nn]o such option|[Mm]issing"):
        check_fl_command(wrong.split())
