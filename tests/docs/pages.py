"""Execution of pages: files and commands from a page's blocks, and a shell that runs them.

The format of an executable page:

- a ```toml or ```python block with a file's name as a comment in its first line is that file;
- in a ```console block, `$ ` begins a command, and other lines are what it prints; `...` stands for any text;
- a ```sh block is a piece of a shell script, run as a whole;
- `&` at the end starts a program in the background, and `echo $?` is the exit code of the command before it. A command
  without it must exit with 0.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest
import typer
import typer.main

import fl_client.__main__ as fl_client_main
from fl_client.setup.commands import app as setup_app
from fl_common.program import settings_files
from fl_ops.commands.cli import app
from fl_server.backup import parser_of
from tests.processes.scripts import Scripts

ROOT = Path(__file__).parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
"""The pages in docs, by their paths from the root."""
TIMEOUT_S = 120.0
"""A page fails after this wait: enough for a busy machine, and no claim about speed."""
LOOKS = re.compile(r"grep |fl (clients|run) list|fl run (show|history) ")
"""Commands that change nothing. Readers repeat them until the shown output appears, and so does the test."""
PORTS = ("7070", "7071", "7072", "7074")


@cache
def commands_of(program: typer.Typer) -> Any:
    """The commands of a program. Typer needs a fifth of a second to make them, so it makes them once."""
    return typer.main.get_command(program)


def check_fl_command(arguments: Sequence[str]) -> None:
    """Fail unless `fl` has the command, and it takes these arguments and options as they stand."""
    _check("fl", commands_of(app), arguments)


def check_fl_client_command(arguments: Sequence[str]) -> None:
    """As `check_fl_command`, for `fl-client`."""
    if arguments[:1] and arguments[0] in fl_client_main.SETUP:
        _check("fl-client", commands_of(setup_app), arguments)
    else:
        settings_files("fl-client", arguments[arguments[:1] == ["run"] :], (1, 1), "files")


def check_fl_server_command(arguments: Sequence[str]) -> None:
    """As `check_fl_command`, for `fl-server`."""
    if arguments[:1] in (["backup"], ["restore"]):
        parser_of(arguments[0]).parse_args(arguments[1:])
        return
    role = arguments.index("--role") if "--role" in arguments else len(arguments)
    own = [*arguments[:role], *arguments[role + 2 :]]
    settings_files("fl-server", own[own[:1] == ["check"] :], (1, 1), "files")


def _check(program: str, command: Any, arguments: Sequence[str]) -> None:
    words = list(arguments)
    if set(words) & {"--help", "--version"}:
        words = words[: next(at for at, word in enumerate(words) if word in {"--help", "--version"})]
        looks_only = True
    else:
        looks_only = False
    while commands := getattr(command, "commands", None):
        if looks_only and not words:
            return
        assert words[:1] in [[name] for name in commands], f"{program} {' '.join(arguments)}: not one of {[*commands]}"
        command = commands[words.pop(0)]
    if not looks_only:
        command.make_context(program, words)


@dataclass(frozen=True)
class File:
    """A file of the page."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command and the lines of its output that the page shows."""

    text: str
    shown: tuple[str, ...] = ()


def read_page(name: str) -> str:
    """A page of the repository, by its path from the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def on_free_ports(text: str) -> tuple[str, dict[str, str]]:
    """The page with its ports replaced by ports that are free here, and what became of each."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    ports = dict(zip(PORTS, (str(free.getsockname()[1]) for free in sockets), strict=True))
    for free in sockets:
        free.close()
    return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda match: ports[match[1]], text), ports


def steps(text: str) -> Iterator[File | Command]:
    """The files and commands of a page, in its order."""
    for kind, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        named = re.match(r"# (\S+\.\w+)\n", body)
        if kind in ("toml", "python") and named:
            yield File(named[1], body)
        elif kind == "console":
            yield from _commands(body)
        elif kind == "sh":
            yield Command(body.rstrip())


def _commands(body: str) -> Iterator[Command]:
    command = ""
    shown: list[str] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            if command:
                yield Command(command, tuple(shown))
            command, shown = line.removeprefix("$ "), []
        else:
            shown.append(line)
    yield Command(command, tuple(shown))


def missing(shown: tuple[str, ...], output: str) -> str | None:
    """The first shown line that is missing in the output, in order; a sequence of blanks counts as one."""
    rest = " ".join(output.split())
    for line in shown:
        for piece in line.split("..."):
            words = " ".join(piece.split())
            at = rest.find(words)
            if at < 0:
                return line
            rest = rest[at + len(words) :]
    return None


class Shell:
    """A bash in its own folder, with the three programs on its path. All its processes end with it."""

    def __init__(self, folder: Path, scripts: Path, admin: str) -> None:
        self.folder = folder
        environment = {
            # A test runner's own COLUMNS would cut the tables that are read here.
            **{key: value for key, value in os.environ.items() if not key.startswith("FL_") and key != "COLUMNS"},
            "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(folder.parent / "config"),
            "OMP_NUM_THREADS": "1",
            # The default address of `fl`, as on the page.
            "FL_ADMIN": admin,
        }
        self._log = (folder.parent / "shell.log").open("wb")
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the session's own processes: it has a process group to itself."""
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.communicate()
        self._log.close()

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and output of a command; of a background one, that it was started."""
        began = (self.folder.parent / "shell.log").stat().st_size
        assert self._bash.stdin is not None
        # The marker keeps `$?` as the command left it, for the next one to ask.
        self._bash.stdin.write(f'{command}\n__code=$?; printf "\\n@end %s@\\n" $__code; (exit $__code)\n'.encode())
        self._bash.stdin.flush()
        ends = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends and self._bash.poll() is None:
            output = (self.folder.parent / "shell.log").read_bytes()[began:].decode()
            if end := re.search(r"\n@end (\d+)@\n", output):
                return int(end[1]), output[: end.start()]
            time.sleep(0.02)
        pytest.fail(f"{command!r} did not end in {TIMEOUT_S:g} s; so far: {output}")

    def follow(self, command: Command, *, must_succeed: bool) -> None:
        """Run a command and compare; one that only looks is repeated until it shows what the page shows."""
        ends = time.monotonic() + TIMEOUT_S
        while True:
            code, output = self.run(command.text)
            absent = missing(command.shown, output)
            fine = absent is None and (code == 0 or not must_succeed)
            if fine or not LOOKS.match(command.text) or time.monotonic() > ends:
                break
            time.sleep(0.5)
        assert absent is None, f"{command.text}\nshould show: {absent}\nshowed:\n{output}\n{self.logs()}"
        assert code == 0 or not must_succeed, f"{command.text}\nended with {code}:\n{output}\n{self.logs()}"

    def logs(self) -> str:
        """The ends of the log files in the folder, for a failed test's report."""
        tails = {path.name: path.read_text().splitlines()[-5:] for path in sorted(self.folder.glob("*.log"))}
        return "\n".join(f"{name}: {line[:300]}" for name, lines in tails.items() for line in lines)


def follow_page(text: str, folder: Path) -> None:
    """Do all steps of a page in a new folder, with its ports replaced by free ones."""
    text, ports = on_free_ports(text)
    follow(list(steps(text)), ports, folder)


def follow(todo: Sequence[File | Command], ports: Mapping[str, str], folder: Path) -> None:
    """Save files and run commands in their order; `ports` is where the page's own ports lie here."""
    folder.mkdir()
    with (
        Scripts(folder.parent / "bin") as scripts,
        Shell(folder, scripts.folder, f"127.0.0.1:{ports['7071']}") as shell,
    ):
        for step, following in zip(todo, [*todo[1:], None], strict=True):
            if isinstance(step, File):
                (folder / step.name).write_text(step.text, encoding="utf-8")
            else:
                asked = isinstance(following, Command) and following.text == "echo $?"
                shell.follow(step, must_succeed=not asked)
