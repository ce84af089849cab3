"""Containerfiles read into instructions, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

VERSION = re.compile(r":\d+\.\d+\.\d+(-[\w.-]+)?(@sha256:[0-9a-f]{64})?$")
LABELS = ("title", "description", "version", "revision", "source", "licenses")


@dataclass(frozen=True)
class Instruction:
    """One instruction, its lines joined."""

    word: str
    value: str


@dataclass(frozen=True)
class Containerfile:
    """A file of `path`, stage by stage; each stage begins with its FROM."""

    path: Path

    @cached_property
    def stages(self) -> list[list[Instruction]]:
        """All instructions, without comments."""
        lines = [line for line in self.path.read_text().splitlines() if line.strip() and not line.startswith("#")]
        joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines()
        stages: list[list[Instruction]] = []
        for line in joined:
            word, _, value = line.partition(" ")
            if word == "FROM":
                stages.append([])
            stages[-1].append(Instruction(word, value.strip()))
        return stages

    @property
    def bases(self) -> list[str]:
        """Images of others that the stages are built on."""
        return [stage[0].value.split()[0] for stage in self.stages]

    def values(self, word: str) -> list[str]:
        """All instructions `word` of the last stage, which is shipped."""
        return [each.value for each in self.stages[-1] if each.word == word]

    @property
    def labels(self) -> dict[str, str]:
        """Of the image, by key."""
        return dict(re.findall(r'([\w.]+)="([^"]*)"', " ".join(self.values("LABEL"))))

    @property
    def copied(self) -> set[str]:
        """What is copied from the repository, in any stage."""
        copies = (each.value.split() for stage in self.stages for each in stage if each.word == "COPY")
        return {source for words in copies if not words[0].startswith("--from") for source in words[:-1]}

    def defaults(self, name: str) -> set[str]:
        """Default of the argument `name`; "" without one."""
        arguments = (each.value.partition("=") for stage in self.stages for each in stage if each.word == "ARG")
        return {value for key, _, value in arguments if key == name}


def problems(file: Containerfile, packages: set[str]) -> Iterator[str]:
    """What must not be in an image of ours, each in a sentence. `packages` are those that it must have."""
    for base in file.bases:
        if not VERSION.search(base):
            yield f"{base} is not pinned to an exact version"
    if len(file.stages) < 2:
        yield "one stage: what it is built with is shipped"
    yield from _about_running(file)
    if missing := [name for name in LABELS if f"org.opencontainers.image.{name}" not in file.labels]:
        yield f"no label for {', '.join(missing)}"
    if missing := sorted(packages - file.copied):
        yield f"not copied: {', '.join(missing)}"
    yield from _about_building(file)


def _about_running(file: Containerfile) -> Iterator[str]:
    users = file.values("USER")
    if not users or users[-1] != "10001:10001":
        yield f"runs as {users[-1] if users else 'root'}, not as 10001:10001"
    if any(each.word == "HEALTHCHECK" for stage in file.stages for each in stage):
        yield "has a HEALTHCHECK: probes are the platform's"
    if file.values("STOPSIGNAL") != ["SIGTERM"]:
        yield "STOPSIGNAL is not SIGTERM"
    for word in ("ENTRYPOINT", "CMD"):
        for value in file.values(word):
            if not _is_exec_form(value):
                yield f"{word} {value} runs in a shell, which keeps signals to itself"
    if not file.values("ENTRYPOINT"):
        yield "no ENTRYPOINT"


def _about_building(file: Containerfile) -> Iterator[str]:
    if any(re.search(r"\bpip3? install|-m pip", each) for each in file.values("RUN")):
        yield "pip installs in the stage that is shipped"
    commands = [part for stage in file.stages for each in stage if each.word == "RUN" for part in _parts(each.value)]
    if not any(each.word == "ENV" and "PIP_REQUIRE_HASHES=1" in each.value for each in file.stages[0]):
        yield "installs without hashes"
    for part in commands:
        if re.search(r"-m pip .*\binstall\b", part) and "--requirement" not in part and "--no-index" not in part:
            yield f"installs what no file names: {part}"
    if any(each.word == "ADD" for stage in file.stages for each in stage):
        yield "ADD fetches and unpacks: COPY does neither"
    if hosts := re.findall(r"https?://[\w.-]+", file.path.read_text()):
        yield f"names a host: {', '.join(hosts)}"


def _parts(command: str) -> list[str]:
    """The single commands of a RUN."""
    return re.split(r"&&|;", command)


def _is_exec_form(value: str) -> bool:
    try:
        words = json.loads(value)
    except ValueError:
        return False
    return isinstance(words, list) and bool(words)
