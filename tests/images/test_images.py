"""What is in the built images, and what is not. They are built by real tools, on base.py's stand-in for the base."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.images.build import IMAGES, REVISION
from tests.images.podman import Podman

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NOT_SHIPPED = ("gcc", "cc", "g++", "clang", "ld", "as", "make", "cmake", "git", "pip", "pip3", "curl", "wget")

FOR_ALL = {"/tmp", "/var/tmp", "/run/lock", "/var/lock"}  # noqa: S108 - the base's world-writable folders, not writable under a read-only root


@pytest.fixture(params=IMAGES)
def name(request: pytest.FixtureRequest) -> str:
    """server, client."""
    return str(request.param)


@pytest.fixture
def image(name: str) -> str:
    """The image's name."""
    return IMAGES[name]


@pytest.fixture
def config(podman: Podman, image: str) -> dict[str, Any]:
    """The image's own metadata."""
    found: dict[str, Any] = json.loads(podman("image", "inspect", image))[0]
    return found


def test_an_image_has_its_metadata(config: dict[str, Any], name: str) -> None:
    """User, entrypoint, stop signal and labels are there; a health check and a volume are not."""
    image = config["Config"]
    assert image["User"] == "10001:10001"
    assert image["Entrypoint"] == [f"fl-{name}"]
    assert image["Cmd"] == ["--config", f"/etc/impetus/{name}.toml"]
    assert image["StopSignal"] == "SIGTERM"
    assert not config.get("Healthcheck")
    assert not image.get("Volumes")
    labels = {key.rpartition(".")[2]: value for key, value in image["Labels"].items() if "opencontainers" in key}
    assert labels["title"] == f"impetus/fl-{name}"
    assert (labels["version"], labels["revision"], labels["licenses"]) == ("0.1.0", REVISION, "Apache-2.0")


def test_an_image_has_no_build_tools(podman: Podman, image: str) -> None:
    """No compiler, no pip, no way to fetch anything, in any folder of programs or of Python."""
    found = podman.inside(image, "sh", "-c", f"command -v {' '.join(NOT_SHIPPED)}")
    assert found.stdout == ""
    packages = r".*/\(pip\|pip[-0-9][^/]*\|setuptools\|setuptools-[^/]*\|ensurepip\)"
    assert podman.inside(image, "find", "/usr", "/opt", "-regex", packages, user="0").stdout == ""
    assert podman.inside(image, "python", "-m", "pip", "--version").returncode != 0


def test_nothing_of_how_it_was_built_is_left(podman: Podman, image: str) -> None:
    """Neither the settings of pip, which may name a private index, nor a trace of them in the image's history."""
    assert podman.inside(image, "ls", "/src", "/etc/pip.conf").stdout == ""
    history = podman("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "TORCH_INDEX" not in history
    assert "http" not in history


def test_no_user_of_an_image_can_write(podman: Podman, image: str) -> None:
    """The user owns only the state folder, and only the base has folders that all can write."""
    assert podman.inside(image, "id").stdout.strip() == "uid=10001(impetus) gid=10001(impetus) groups=10001(impetus)"
    theirs = podman.inside(image, "find", "/", "-xdev", "-uid", "10001", "-o", "-gid", "10001", user="0")
    assert theirs.stdout.split() == ["/var/lib/impetus"]
    anybodys = podman.inside(image, "find", "/", "-xdev", "-not", "-type", "l", "-perm", "-o+w", user="0")
    assert set(anybodys.stdout.split()) <= FOR_ALL


def test_bytecode_is_in_it(podman: Podman, image: str) -> None:
    """A start reads bytecode, whatever times the files have: it compiles nothing, and could not keep it."""
    program = "import fl_server.app, torch, sys; print(fl_server.app.__cached__)"
    cached = podman.inside(image, "python", "-c", program).stdout.strip()
    assert cached
    check = f"import pathlib; print(pathlib.Path({cached!r}).read_bytes()[4:8].hex())"
    assert podman.inside(image, "python", "-c", check).stdout.strip() == "01000000"


def test_its_program_starts(podman: Podman, image: str, name: str) -> None:
    """The entrypoint starts and prints its usage."""
    done = podman.inside(image, f"fl-{name}", "--help")
    assert done.returncode == 0, done.stderr
    assert "--config" in done.stdout


def test_only_the_server_has_the_postgresql_driver(podman: Podman, image: str, name: str) -> None:
    """Extras are where they are needed, and nowhere else."""
    done = podman.inside(image, "python", "-c", "import psycopg")
    assert (done.returncode == 0) == (name == "server"), done.stderr


def test_its_size_is_printed(
    podman: Podman, config: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """How large it is, layer by layer; and no larger than a build of torch for CPUs allows."""
    layers = podman("history", "--format", "{{.Size}}", IMAGES[name]).splitlines()
    with capsys.disabled():
        print(f"\n{IMAGES[name]}: {config['Size'] / 1e6:.0f} MB, layers {[each for each in layers if each != '0 B']}")  # noqa: T201
    assert config["Size"] < 1.5e9
