"""The templates of `fl new`, and what each has of its own in run.toml, README and dependencies."""

from __future__ import annotations

from dataclasses import dataclass

_SGD = "learning_rate = {rate}\nepochs = 2\nbatch_size = 16"
_ADAMW = _SGD + '\noptimizer = {{ name = "adamw", weight_decay = 0.01 }}'
_FEDCM = 'name = "fedcm"\nparameters = { alpha = 0.2 }'
_FEDAVG = 'name = "fedavg"'


@dataclass(frozen=True)
class Template:
    """What one template has of its own, beside its files."""

    subject: str
    layout: str
    """The content of a site's folder, in words."""
    algorithm: str
    local: str
    """The lines of the sections [algorithm] and [local] of run.toml."""
    rate: float = 0.01
    """Learning rate of the task's own test, with AdamW."""
    needs: tuple[str, ...] = ()
    """Packages that the task imports beside Impetus and torch."""


TEMPLATES = {
    "image": Template(
        "images by class",
        "a folder of PNG files for each class",
        _FEDAVG,
        _ADAMW.format(rate=0.005),
        needs=("pillow",),
    ),
    "text": Template("short texts by class", "`texts.csv`", _FEDAVG, _ADAMW.format(rate=0.01)),
    "tabular": Template("rows of a table by class", "`table.csv`", _FEDCM, _SGD.format(rate=0.1)),
    "lora": Template(
        "short texts by class, with a frozen transformer and low-rank adapters, in the folder `checkpoint`",
        "`texts.csv`",
        _FEDAVG,
        _ADAMW.format(rate=0.01).replace("epochs = 2", "epochs = 4"),
        needs=("transformers", "peft"),
    ),
    "transformers": Template(
        "short texts by class, with a transformer in the folder `checkpoint`",
        "`texts.csv`",
        _FEDAVG,
        _ADAMW.format(rate=0.003),
        rate=0.003,
        needs=("transformers",),
    ),
}
