"""Makes a package with a task from one of the templates, with generated data for two sites.

A template is a folder of files whose names end in `.template`. Those of `common` belong to every template. Words in
capitals are replaced: PACKAGE by the package's name, TASK by that of the class, others by those of `TEMPLATES`.
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fl_ops.errors import Refused, UsageError

_FOLDER = Path(__file__).parent / "templates"
_SUFFIX = ".template"
_PLACES = {
    "gitignore": ".gitignore",
    **{name: name for name in ("pyproject.toml", "README.md", "run.toml", "two-daemons.sh")},
    **{name: f"PACKAGE/{name}" for name in ("task.py", "data.py", "generate.py")},
    "test_task.py": "tests/test_task.py",
}
"""Where the file of a template is in the new folder."""
_IMPORTED_AS = {"pillow": "PIL"}


def make(name: str, template: str, parent: Path) -> Path:
    """Make the folder `parent / name` with the package and its data. Returns it; it is whole or it is not there.

    Raises UsageError for a name that cannot be one of a package, and for a package that is missing; Refused for a
    folder that exists, and for data that could not be generated.
    """
    _check_name(name)
    chosen = TEMPLATES[template]
    if missing := [package for package in chosen.needs if find_spec(_IMPORTED_AS.get(package, package)) is None]:
        raise UsageError(f"the template {template} needs {', '.join(missing)}: pip install {' '.join(missing)}")
    target = parent / name
    if target.exists():
        raise Refused(f"{target} exists: choose another name, or remove it")
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}-") as folder:
            made = Path(folder, name)
            _write(made, template, _words(name, chosen))
            _generate(made, name)
            made.replace(target)
    except OSError as error:
        raise Refused(f"{target} could not be made: {error.strerror or error}") from error
    return target


def task_name(package: str) -> str:
    """The task of a new package, `module:attribute`."""
    return f"{package}.task:{_class_name(package)}"


def _class_name(package: str) -> str:
    return "".join(part.capitalize() for part in package.split("_"))


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", name) or keyword.iskeyword(name):
        raise UsageError(f"expected a package's name of lower-case letters, digits and _, as in my_task, got {name!r}")
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        raise UsageError(f"expected a new name, got {name!r}, which is a module here: it would hide the new package")


def _words(name: str, template: Template) -> dict[str, str]:
    return {
        "DEPENDENCIES": ", ".join(f'"{package}"' for package in ("impetus-fl", *template.needs)),
        **{word.upper(): str(value) for word, value in vars(template).items() if word != "needs"},
        "PACKAGE": name,
        "TASK": _class_name(name),
    }


def _write(target: Path, template: str, words: dict[str, str]) -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(words)})\b")
    for source in [*(_FOLDER / "common").iterdir(), *(_FOLDER / template).iterdir()]:
        place = target / _PLACES[source.name.removesuffix(_SUFFIX)].replace("PACKAGE", words["PACKAGE"])
        place.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        place.write_text(pattern.sub(lambda match: words[match[0]], text), encoding="utf-8")
    (target / words["PACKAGE"] / "__init__.py").write_text(f'"""The task of {words["PACKAGE"]}."""\n', encoding="utf-8")
    (target / "tests" / "__init__.py").touch()
    (target / "two-daemons.sh").chmod(0o755)


def _generate(folder: Path, name: str) -> None:
    """Run the package's own generator, in its folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder.resolve()), *filter(None, sys.path)])}
    # fl_tasks comes first: it makes torchvision fit a build of torch, before other libraries import it.
    program = f"import fl_tasks, runpy; runpy.run_module('{name}.generate', run_name='__main__')"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(  # noqa: S603 - this Python, and a name that was checked
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        *trace, last = done.stdout.strip().splitlines() or ["no output"]
        error = Refused(f"the data could not be generated: {last}")
        error.trace = "\n".join(trace)
        raise error
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache)


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
