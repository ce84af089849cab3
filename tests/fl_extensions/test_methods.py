"""Methods and reducers from outside, loaded by name: what is imported, what is called, and what is refused."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import algorithms as fl
from fl_extensions.methods import Code, NotListed, load_method, load_reducer, load_staleness

METHOD = """
import algorithms as fl

__version__ = "3"


def half(alpha: fl.SharePerRound = 0.5) -> fl.Method:
    return fl.Method(fl.Correction(lambda client: fl.LocalRule(a=alpha)), "uniform")


def first() -> fl.Reducer:
    return fl.Reducer(reduce=lambda values, weights: values[0])


def halving() -> fl.Staleness:
    return fl.Staleness(lambda staleness: 0.5**staleness)
"""
Write = Callable[[str], str]
NUMBERS = itertools.count()
"""A process remembers the methods that it has loaded, so each module has a name of its own."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module of a new name, which can be imported, and returns the name."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(text: str) -> str:
        names.append(f"outside_{next(NUMBERS)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_listed_method_is_built_with_its_parameters(module: Write) -> None:
    """By `module:attribute`, with version and source of the module. Its parameters are checked like any others."""
    name = f"{module(METHOD)}:half"
    code = load_method(name, [name])
    assert code is not None
    assert (code.name, code.version, code.source[:7], len(code.source)) == (name, "3", "sha256:", 71)
    assert fl.build(name).parameters["alpha"] == 0.5
    assert fl.build(name, alpha=0.25, server_optimizer="momentum").local_rule(None).a == 0.25
    with pytest.raises(fl.AlgorithmError, match="parameter 'alpha': expected a number over 0 and at most 1; got 2"):
        fl.build(name, alpha=2)
    assert fl.at_round(fl.build(name), {"alpha": fl.Schedule("linear", end=1.0)}, 9, 10).parameters["alpha"] == 1.0


def test_a_listed_rule_weighs_stale_updates(module: Write) -> None:
    """A function that returns a Staleness; one that returns a Method is no rule."""
    name = module(METHOD)
    code = load_staleness(f"{name}:halving", [f"{name}:halving"])
    assert code is not None
    assert code.version == "3"
    assert fl.build_staleness(f"{name}:halving").weights([0, 1, 3]) == (1.0, 0.5, 0.125)
    with pytest.raises(fl.AlgorithmError, match="not annotated to return Staleness"):
        load_staleness(f"{name}:half", [f"{name}:half"])


def test_the_text_of_the_module_is_the_fingerprint(module: Write) -> None:
    """Two modules with one text have one source; a comment makes another."""
    same, again, other = module(METHOD), module(METHOD), module(f"{METHOD}# More.\n")
    codes = [load_method(f"{name}:half") for name in (same, again, other)]
    sources = [code.source for code in codes if isinstance(code, Code)]
    assert sources[0] == sources[1] != sources[2]


def test_an_unlisted_module_is_not_imported(module: Write, tmp_path: Path) -> None:
    """Its code would leave a file."""
    name = module(f"from pathlib import Path\nPath({str(tmp_path / 'marker')!r}).touch()\n")
    for load in (load_method, load_reducer, load_staleness):
        with pytest.raises(NotListed, match="or a listed one \\(none\\), got"):
            load(f"{name}:half", [])
    assert not (tmp_path / "marker").exists()


def test_built_in_names_are_built_in() -> None:
    """They have no code of their own, and no other code can take them."""
    assert (load_method("fedcm", []), load_reducer("median", [])) == (None, None)
    with pytest.raises(fl.AlgorithmError, match="expected a name that no method of this package has"):
        fl.add_method("fedcm", lambda: fl.Method(fl.Correction(), "uniform"))


def test_an_entry_point_needs_no_list(module: Write, tmp_path: Path) -> None:
    """The names of installed packages, each in the group of its kind; two packages with one name are refused."""
    name = module(METHOD)
    for package in ("one", "two"):
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        points = f"[impetus.algorithms]\n{package}-half = {name}:half\n[impetus.reducers]\nboth = {package}:first\n"
        (info / "entry_points.txt").write_text(points)
    code = load_method("one-half", [])
    assert code is not None
    assert fl.build("one-half").name == "one-half"
    with pytest.raises(fl.AlgorithmError, match="expected one installed package with an entry point of this name"):
        load_reducer("both", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def half(alpha=0.5): raise SystemExit", "not annotated to return Method, so it was not called"),
        (
            "import algorithms as fl\nhalf = fl.Method(fl.Correction(), 'uniform')",
            "expected a function such as def half",
        ),
        ("import algorithms as fl\ndef half(alpha: float = 0.5) -> fl.Method: ...", "expected a type with its range"),
        (
            "import algorithms as fl\ndef half(alpha: fl.Share) -> fl.Method: ...",
            "'alpha': expected a default, got none",
        ),
        ("import algorithms as fl\ndef half() -> fl.Method: ...", "expected that it returns a Method, got NoneType"),
        ("import algorithms as fl\ndef half() -> fl.Method: 1 / 0", "raised ZeroDivisionError: division by zero"),
        ("1 / 0", ":half raised ZeroDivisionError: division by zero"),
        ("def other(): ...", "has no attribute half; its functions are other"),
        (
            "from algorithms import *\ndef half(order: Share = 0.5) -> Method: return Method(Correction(), 'uniform')",
            "parameter 'order': expected a name that no option of every method has",
        ),
    ],
)
def test_what_is_no_method_is_refused(module: Write, text: str, expected: str) -> None:
    """The message has what was expected and what came, and the name is not known afterwards."""
    name = f"{module(text)}:half"
    with pytest.raises(fl.AlgorithmError) as refused:
        load_method(name)
    assert expected in str(refused.value)
    assert not fl.is_known(name)
