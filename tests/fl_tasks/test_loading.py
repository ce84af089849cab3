"""Tasks by name, and their fingerprints."""

from __future__ import annotations

import hashlib
import sys
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_tasks import BUILT_IN, TaskError, TaskNotListed, fingerprint, load_task, own_options

NUMBERS = count()

PLAIN = """
    import torch
    from fl_tasks import Examples

    class Plain:
        version = "7"
        def __init__(self, width=1, fail=False):
            self.width = width
            if fail:
                raise KeyError("no such file")
        def model(self): return torch.nn.Linear(self.width, 1)
        def loss(self, output, target): return (output - target).square().mean()
        def train_data(self, shard): return Examples(torch.zeros(2, self.width), torch.zeros(2, 1))
        def eval_data(self, shard=None): return self.train_data(shard)
        def metrics(self, output, target): return {"loss": (output - target).square()[:, 0]}

    def factory(**options) -> "Plain": return Plain(**options)
    def silent(**options):
        import pathlib
        pathlib.Path("called").touch()
        return Plain(**options)
    def other(**options) -> dict: return silent(**options)
    def vague(**options) -> "Nowhere": return silent(**options)
    class Callable_:
        version = "1"
        def __call__(self, **options): return silent(**options)
    callable_ = Callable_()
    class Late(Plain):
        version = property(lambda self: "9")
    finished = Plain(width=3)
    number = 5
    class Half:
        version = "1"
        def model(self): pass
        def loss(self, output, target): pass
    class Numbered(Plain):
        version = 1
"""


WriteModule = Callable[..., str]
"""(source) -> name of a new module in the current directory."""


def width_of(task: object) -> object:
    """The option of a task of PLAIN."""
    return vars(task)["width"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """Writes a module of a fresh name into the current directory; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write(source: str = PLAIN) -> str:
        name = f"written_task_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    return write


@pytest.mark.parametrize("attribute", ["Plain", "factory"])
def test_a_class_or_a_factory_is_called_with_the_options(module: WriteModule, attribute: str) -> None:
    """Options are keyword arguments; the module lies in the current directory."""
    task = load_task(f"{module()}:{attribute}", {"width": 4})
    assert (width_of(task), task.version) == (4, "7")


def test_a_version_may_be_a_property(module: WriteModule) -> None:
    """Its value is read from the created object."""
    assert load_task(f"{module()}:Late").version == "9"


@pytest.mark.parametrize("attribute", ["silent", "other", "vague", "callable_"])
def test_an_undeclared_task_is_never_called(module: WriteModule, tmp_path: Path, attribute: str) -> None:
    """A function without the annotation, with another or an unknown one, and any other callable."""
    with pytest.raises(TaskError, match="annotated to return one|reading what|without model"):
        load_task(f"{module()}:{attribute}", {"width": 4})
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("name", ["subprocess:run", "subprocess:Popen", "os:system", "builtins:exec", "builtins:dict"])
def test_a_program_is_not_started(tmp_path: Path, name: str) -> None:
    """Functions and classes of Python itself are no tasks, and none is called."""
    marker = tmp_path / "marker"
    with pytest.raises(TaskError, match="annotated to return one|without version"):
        load_task(name, {"args": ["touch", str(marker)]})
    assert not marker.exists()


def test_a_module_that_is_not_listed_is_not_imported(module: WriteModule, tmp_path: Path) -> None:
    """With a list, an unlisted module is refused before any of its code runs, and a listed one is loaded."""
    name = module(f"import pathlib; pathlib.Path({str(tmp_path / 'marker')!r}).touch()" + "\nclass Wine: pass")
    with pytest.raises(TaskNotListed, match=rf"or a listed one \(my_task:Wine\), got '{name}:Wine'"):
        load_task(f"{name}:Wine", listed=["my_task:Wine"])
    assert not (tmp_path / "marker").exists()
    assert name not in sys.modules
    plain = f"{module()}:Plain"
    assert width_of(load_task(plain, {"width": 2}, [plain])) == 2
    assert load_task("digits", listed=[]).version == "1"


def package(folder: Path, name: str, points: str) -> None:
    """An installed package, as far as its entry points go."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[impetus.tasks]\n{points}\n")


def test_an_entry_point_of_an_installed_package_is_a_task(
    module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its short name, without being listed; two packages with one name are refused, and an unknown name lists it."""
    monkeypatch.syspath_prepend(tmp_path)
    name = module()
    package(tmp_path, "vineyard", f"wine = {name}:Plain\nprogram = subprocess:run")
    assert width_of(load_task("wine", {"width": 5}, listed=[])) == 5
    with pytest.raises(TaskError, match="annotated to return one"):
        load_task("program", {"args": "true"}, listed=[])
    with pytest.raises(TaskError, match=r'an installed one \(program, wine\).*Did you mean "wine"'):
        load_task("wines")
    package(tmp_path, "cellar", "wine = cellar:Wine")
    with pytest.raises(TaskError, match=f"task wine: expected one installed package .*, got cellar:Wine, {name}:Plain"):
        load_task("wine")


def test_a_finished_task_is_taken_as_it_is(module: WriteModule) -> None:
    """An instance needs no call, and options for it are refused."""
    name = module()
    assert width_of(load_task(f"{name}:finished")) == 3
    with pytest.raises(TaskError, match="finished object and takes no options, got width"):
        load_task(f"{name}:finished", {"width": 4})


def test_the_current_directory_hides_no_installed_module(module: WriteModule, tmp_path: Path) -> None:
    """A file json.py next to the configuration does not replace json."""
    (tmp_path / "colorsys.py").write_text("raise SystemExit")
    sys.modules.pop("colorsys", None)
    with pytest.raises(TaskError, match="module colorsys has no attribute Wine"):
        load_task("colorsys:Wine")


@pytest.mark.parametrize(("name", "hint"), [("digit", 'Did you mean "digits"'), ("zzz", '"zzz".$'), (":Wine", "")])
def test_an_unknown_name_lists_the_known_ones(name: str, hint: str) -> None:
    """The built-in tasks, the form for one's own and the nearest name are in the message."""
    with pytest.raises(TaskError, match=f"digits, fashion-mnist, cifar10.* as module:attribute.*{hint}"):
        load_task(name)


@pytest.mark.parametrize("name", ["no_such_module:Wine", "no_such_package.wine:Wine", "fl_tasks.no_such:Wine"])
def test_a_missing_module_is_reported_with_the_remedy(name: str) -> None:
    """The message names the module and the two places where it may come from."""
    with pytest.raises(TaskError, match=r"there is no module .*pip install .* start in the folder") as caught:
        load_task(name)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_module_that_lacks_a_library_names_the_library(module: WriteModule) -> None:
    """A missing import inside the task's module is not reported as a missing task."""
    with pytest.raises(TaskError, match=r"importing \w+ for task .* No module named 'no_such_library'"):
        load_task(f"{module('import no_such_library')}:Wine")


def test_a_module_that_raises_keeps_the_cause(module: WriteModule) -> None:
    """What the module's own code raises is in the message and is the cause."""
    with pytest.raises(TaskError, match="raised ZeroDivisionError: division by zero") as caught:
        load_task(f"{module('1 / 0')}:Wine")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_missing_attribute_lists_the_classes(module: WriteModule) -> None:
    """A misspelt class finds its neighbours in the message."""
    with pytest.raises(TaskError, match="no attribute Plane; its classes are Callable_, Half, Late, Numbered, Plain"):
        load_task(f"{module()}:Plane")


def test_an_option_that_is_not_taken_lists_those_that_are(module: WriteModule) -> None:
    """The name given and the names accepted are in the message, the task is not made."""
    with pytest.raises(TaskError, match=r"options depth: .*; it accepts width, fail"):
        load_task(f"{module()}:Plain", {"depth": 4})


def test_a_task_that_raises_when_made_keeps_the_cause(module: WriteModule) -> None:
    """An exception of the constructor is named with the options."""
    with pytest.raises(TaskError, match=r"making task .* \{'fail': True\} raised KeyError") as caught:
        load_task(f"{module()}:Plain", {"fail": True})
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("attribute", "missing"),
    [
        ("Half", "'Half' without train_data, eval_data, metrics;"),
        ("Numbered", "'Numbered' without version;"),
        ("number", "'int' without version, model, loss,"),
    ],
)
def test_missing_members_are_named(module: WriteModule, attribute: str, missing: str) -> None:
    """An incomplete object is refused with its missing members; a version that is no string counts as missing."""
    with pytest.raises(TaskError, match=missing):
        load_task(f"{module()}:{attribute}")


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tasks_are_made_without_data(name: str) -> None:
    """Every built-in task is complete and creates its model without any file."""
    task = load_task(name)
    assert list(task.model().parameters())
    assert fingerprint(task)[0].split(", ")[0] == "1"


def test_built_in_tasks_refuse_options_too() -> None:
    """The options of a built-in task are checked like any other's."""
    with pytest.raises(TaskError, match="it accepts data_root, download, model, client_eval_fraction"):
        load_task("cifar10", {"size": 3})


def test_the_fingerprint_is_the_modules_text(module: WriteModule) -> None:
    """version and sha256 of the file's text, computed here on its own; line ends do not count."""
    source = textwrap.dedent(PLAIN)
    expected = "sha256:" + hashlib.sha256(source.encode()).hexdigest()
    assert ("7", expected) == fingerprint(load_task(f"{module()}:Plain"))
    assert ("7", expected) == fingerprint(load_task(f"{module(source.replace(chr(10), chr(13) + chr(10)))}:Plain"))


def test_the_fingerprint_changes_with_the_text(module: WriteModule) -> None:
    """One more comment in the module is another fingerprint."""
    assert fingerprint(load_task(f"{module()}:Plain")) != fingerprint(load_task(f"{module(PLAIN + '    # x')}:Plain"))


@pytest.mark.parametrize("kind", [SimpleNamespace, type("Typed", (), {"__module__": "typed_by_hand"})])
def test_a_task_without_source_has_no_fingerprint(kind: type[Any]) -> None:
    """A class that no file of the author defines cannot be compared between machines."""
    task = kind()
    task.version = "1"
    with pytest.raises(TaskError, match=f"class {kind.__name__} of module .* has no source here"):
        fingerprint(task)


def test_options_that_name_files_are_known(module: WriteModule) -> None:
    """Those that a task declares, and those that are annotated as a path; a built-in task declares its own."""
    name = module(
        PLAIN
        + """
    from pathlib import Path
    class Backbone(Plain):
        own_options = ("backbone",)
        def __init__(self, backbone="", folder: "Path | None" = None, where: Path = Path("x"), width: int = 1): ...
    class Wrong(Plain):
        own_options = "backbone"
    """
    )
    assert own_options(f"{name}:Backbone") == {"backbone", "folder", "where"}
    assert (own_options(f"{name}:Plain"), own_options("digits")) == (frozenset(), frozenset())
    assert own_options("cifar10") == {"data_root", "download"}
    assert own_options("shakespeare") == {"data_root", "base"}
    with pytest.raises(TaskError, match="expected own_options to be names of options"):
        own_options(f"{name}:Wrong")
