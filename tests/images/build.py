"""Build the images as in k8s/images/README.md, with the package index of this machine's pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.images.podman import Podman

ROOT = Path(__file__).parents[2]
IMAGES = {"server": "registry.invalid/impetus/fl-server:0.1.0", "client": "registry.invalid/impetus/fl-client:0.1.0"}
REVISION = "0123456789abcdef"


def build(podman: Podman, image: str) -> None:
    """Build an image of IMAGES; its base must be in the storage."""
    (name,) = (name for name, each in IMAGES.items() if each == image)
    settings = podman.folder / "pip.conf"
    settings.write_text(pip_settings())
    mounts = [word for path in local_paths(settings.read_text()) for word in ("--volume", f"{path}:{path}:ro")]
    podman(
        *("build", "--file", f"k8s/images/{name}.Containerfile", "--tag", image, "--pull=never", "--layers"),
        *("--network=host", "--secret", f"id=pip.conf,src={settings}", *mounts),
        *("--build-arg", f"REVISION={REVISION}", "--build-arg", "SOURCE=a working tree", str(ROOT)),
        folder=ROOT,
    )


def pip_settings() -> str:
    """A pip.conf with the settings of this machine's files and environment."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "999"})
    found = re.findall(r"^(global|install|:env:)\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE)
    # As in pip itself, the environment wins over a file.
    found.sort(key=lambda each: each[0] == ":env:")
    values = {key: value for _, key, value in found if key != "constraint"}
    return "".join(["[global]\n", *(f"{key} = {value}\n" for key, value in values.items())])


def local_paths(settings: str) -> list[Path]:
    """Files and folders of this machine that the settings name: certificates, packages, indexes of packages."""
    words = re.findall(r"(file://)?(/[^\s'\"]+)", re.sub(r"https?://\S+", "", settings))
    # The packages of an index are in the same folder.
    paths = (Path(path).parent if scheme else Path(path) for scheme, path in words)
    return sorted({path for path in paths if path.exists()})
