"""The commands that a newcomer types: here by each template of `fl new`, in Flower as its documentation has them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

APP = Path(__file__).with_name("flower_app")
"""Stands for Flower's template where its hub is not reached: the template's dependencies, generated images."""
HUB = "hub-not-reached"
"""The file that a path leaves if it needed the stand-in."""
_ENVIRONMENT = ("python3 -m venv env", ". env/bin/activate")
_NEEDS: Mapping[str, str] = {"image": "pillow", "lora": "transformers peft", "transformers": "transformers"}
TEMPLATES = ("image", "text", "tabular", "lora", "transformers")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to a trained model. The commands are lines of one shell that starts in an empty folder."""

    name: str
    commands: Sequence[str]
    ends: str
    """What the last command prints once there is a trained model."""


def own(template: str, wheel: Path) -> Way:
    """The way here: docs/start/bring-your-own-model.md."""
    wanted = " ".join([shlex.quote(f"{wheel}[server]"), *_NEEDS.get(template, "").split()])
    return Way(
        f"Impetus, {template}",
        [
            *_ENVIRONMENT,
            "pip install uv",
            f"uv pip install {wanted}",
            f"fl new my_task --template {template}",
            "cd my_task",
            "fl task check my_task.task:MyTask --folder data/site-0 --folder data/site-1",
            "sh two-daemons.sh",
        ],
        "model.safetensors",
    )


def flower() -> Way:
    """The way of "Quickstart PyTorch" in Flower's documentation. Its template comes from a hub, not from an index."""
    new = "flwr new @flwrlabs/quickstart-pytorch"
    without_hub = f"{{ cp -r {shlex.quote(str(APP))} quickstart-pytorch && touch {HUB}; }}"  # not typed by a newcomer
    return Way(
        "Flower",
        [
            *_ENVIRONMENT,
            "pip install 'flwr[simulation]'",
            f"{new} || {without_hub}",
            "cd quickstart-pytorch",
            "flwr run . --stream",  # installs what the app depends on, with uv
        ],
        "Strategy execution finished",
    )
