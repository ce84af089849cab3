"""The help of `fl` and of `fl-client`: examples that parse, true defaults, no noise; and completion in a shell."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.text import Text
from typer.testing import CliRunner

from fl_client.setup import commands as client_commands
from fl_client.setup.enrolling import ENROLL_PORT
from fl_common.proxies import ENVIRONMENT
from fl_ops.admin import settings
from fl_ops.commands.cli import app
from fl_ops.commands.local.landscape import GridFlags
from fl_ops.commands.places import COMMANDS
from fl_ops.demo.settings import DemoSettings
from fl_ops.simulate.engine_choice import EngineRequest
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.saving.save import SAVE_EVERY_S
from fl_ops.simulate.settings import SimulationSection
from protos.fl.v1 import admin_pb2
from tests.docs.pages import check_fl_client_command, check_fl_command
from tests.fl_ops.conftest import FakeAdmin

ROOT = Path(__file__).parents[3]


def commands(group: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of a program with its words, groups too."""
    yield names, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*names, name))


FL = dict(commands(typer.main.get_command(app), ("fl",)))
CLIENT = dict(commands(typer.main.get_command(client_commands.app), ("fl-client",)))
LEAVES = {words: command for words, command in {**FL, **CLIENT}.items() if not hasattr(command, "commands")}


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_has_examples_that_parse(words: tuple[str, ...]) -> None:
    """The examples at the end of the help are command lines of this command."""
    heading, *lines = LEAVES[words].epilog.split("\n\n")
    assert heading == ("Example:" if len(lines) == 1 else "Examples:")
    for line in lines:
        given = shlex.split(line)
        assert tuple(given[: len(words)]) == words
        (check_fl_command if words[0] == "fl" else check_fl_client_command)(given[1:])


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_no_word_of_the_help_is_taken_for_markup(words: tuple[str, ...]) -> None:
    """Rich leaves out what it takes for a tag, such as the [section] of a file, unless a backslash is before it."""
    command = LEAVES[words]
    for text in filter(None, (command.help, *(getattr(each, "help", None) for each in command.params))):
        assert Text.from_markup(text).plain == text.replace("\\[", "[")


WITH_JSON = {
    ("fl",),
    *(
        ("fl", "run", name)
        for name in ("create", "list", "show", "watch", "pause", "resume", "extend", "stop", "history")
    ),
    *(("fl", "clients", name) for name in ("list", "ban", "unban", "release", "forget", "drain")),
    *(("fl", "ca", *names) for names in (("init",), ("issue", "server"), ("issue", "client"), ("issue", "admin"))),
    *(("fl", name) for name in ("export", "partition", "version")),
}
"""Commands whose help has --json."""


@pytest.mark.parametrize("words", FL, ids=" ".join)
def test_a_command_explains_itself(words: tuple[str, ...]) -> None:
    """Its help has its usage and --json, and no type after a switch: nobody types a value after --json."""
    result = CliRunner().invoke(app, [*words[1:], "--help"])
    assert result.exit_code == 0
    assert "Usage: fl" in result.stdout
    assert "bool" not in result.stdout
    assert "--help" in result.stdout
    assert "--json" in result.stdout or words not in WITH_JSON


def test_the_commands_with_json_exist() -> None:
    """No entry of the list above is of a command that was renamed."""
    assert WITH_JSON <= FL.keys()


SERVER = {words for words, command in FL.items() if any(parameter.name == "server" for parameter in command.params)}
DEFAULTS: dict[tuple[tuple[str, ...], str], bool] = {
    **{(words, "server"): settings.DEFAULT_SERVER == "127.0.0.1:7071" for words in SERVER},
    **{(words, "proxy"): settings.Connection.proxy_setting == ENVIRONMENT for words in SERVER},
    (("fl", "run", "show"), "target"): True,  # test_target.py
    (("fl", "run", "evaluations"), "number"): True,  # test_evaluations.py
    (("fl", "run", "list"), "limit"): True,  # of no limit or of all: tested with the pages of lists
    (("fl", "run", "show"), "limit"): True,
    (("fl", "clients", "list"), "state"): True,
    (("fl", "compare"), "out"): True,  # test_compare.py
    (("fl", "compare"), "cells"): True,
    (("fl", "compare"), "device"): BatchedOptions().device.type == "cpu",
    (("fl", "compare"), "precision"): BatchedOptions().precision == "float32",
    (("fl", "landscape"), "points"): [GridFlags(two=two).grid().points for two in (False, True)] == [41, 21],
    (("fl", "simulate"), "engine"): EngineRequest().options().batched is None,
    (("fl", "simulate"), "workers"): EngineRequest().options(runs=10**6).workers == 1,
    (("fl", "simulate"), "save_every"): SAVE_EVERY_S == 30,
    (("fl", "simulate"), "device"): BatchedOptions().device.type == "cpu",
    (("fl", "simulate"), "strategy"): BatchedOptions().strategy is None,
    (("fl", "simulate"), "group"): BatchedOptions().group == 0,
    (("fl", "simulate"), "precision"): BatchedOptions().precision == "float32",
    (("fl", "demo"), "algorithm"): DemoSettings.algorithms == ("fedcm", "fedavg"),
    (("fl-client", "init"), "ca"): True,  # test_init.py
    (("fl-client", "init"), "cert"): True,
    (("fl-client", "init"), "key"): True,
    (("fl-client", "init"), "enroll_server"): ENROLL_PORT == 7074,
    (("fl-client", "privacy"), "delta"): True,  # tests/fl_client/privacy/test_account.py
    (("fl-client", "init"), "yes"): True,  # of no option in particular
}
"""Options whose help names a default in words -> whether the code has the same."""


def test_defaults_in_words_are_true() -> None:
    """Each has an entry above. Others are printed by the library from the code."""
    named = {
        (words, parameter.name)
        for words, command in {**FL, **CLIENT}.items()
        for parameter in command.params
        if "default" in (getattr(parameter, "help", None) or "").lower()
    }
    assert named == {key for key, true in DEFAULTS.items() if true}


def test_the_defaults_of_a_simulation_are_true() -> None:
    """`fl simulate --help` has each key of [simulation] with the value that the code uses."""
    text = " ".join(FL["fl", "simulate"].help.split())
    named = re.search(r"defaults of \\\[simulation\] are (.*?); docs", text)
    assert named
    toml = re.sub(r"(, | and )(?=\w+ = )", "\n", named[1])
    fields = {name: field.default for name, field in SimulationSection.model_fields.items()}
    unset = [fields.pop(name) for name in ("system", "digests", "measure", "folders", "task_options")]
    assert unset == [None, None, None, None, {}]
    assert tomllib.loads(toml) == fields


def complete(line: str, address: str) -> list[str]:
    """What bash gets for the last word of a command line."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FL_")},
        "_FL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1),
        "FL_ADMIN": address, "FL_INSECURE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "fl_ops"], env=environment, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fl run show di", ["digits-2", "digits-1"]),
        pytest.param("fl export wi", ["wine"], marks=pytest.mark.slow),
        pytest.param("fl clients ban edge-1", ["edge-1", "edge-10"], marks=pytest.mark.slow),
        ("fl partition cif", ["cifar10", "cifar100"]),
        pytest.param("fl run sho", ["show"], marks=pytest.mark.slow),
    ],
)
def test_completion(admin: FakeAdmin, line: str, expected: list[str]) -> None:
    """Names of runs and clients come from the coordinator, the newest run first."""
    admin.responses["ListRuns"] = admin_pb2.ListRunsResponse(
        runs=[admin_pb2.RunStatus(run_id=name) for name in ("digits-1", "wine", "digits-2")]
    )
    admin.responses["ListClients"] = admin_pb2.ListClientsResponse(
        clients=[admin_pb2.ClientStatus(client_id=f"edge-{number}") for number in (1, 2, 10)]
    )
    assert complete(line, admin.address) == expected


@pytest.mark.slow
def test_completion_without_a_coordinator() -> None:
    """A port that accepts connections and never answers gives no names and no error, in the time of the limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert complete("fl run show di", f"127.0.0.1:{silent.getsockname()[1]}") == []


def test_the_daily_commands_come_first() -> None:
    """In the help of `fl`, on the first screen."""
    lines = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output.splitlines()
    shown = [line.split()[1] for line in lines[:24] if line.startswith("│ ") and line[2].isalpha()]
    assert shown[:2] == ["run", "clients"]


def test_the_list_of_commands_has_their_own_sentences() -> None:
    """The help of `fl` reads a table, in place of the commands: each has its name and the beginning of its own help."""
    for name, place in COMMANDS.items():
        own = " ".join(str(place.load(name).help).split("\n\n")[0].split())
        assert place.help == own, name


def test_the_help_loads_no_library_of_a_command() -> None:
    """An answer without work stays quick: only typer and rich are needed for it."""
    asked = "import sys; sys.argv = ['fl', '--help']\nfrom fl_ops.__main__ import main\n"
    told = asked + "try: main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert "Create, watch and control training runs." in done.stdout
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert {"typer", "rich"} <= loaded
    heavy = {"torch", "numpy", "grpc", "google", "pydantic", "sqlalchemy", "cryptography", "structlog", "fl_server"}
    assert not loaded & heavy
