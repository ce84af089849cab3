"""docs/development/changes.md: its counts, and two of its changes, made in a copy of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.development.changed_copy import ChangedCopy, files_of_change
from tests.docs.pages import read_page


def test_the_counts_of_usual_changes_are_those_of_their_files() -> None:
    """Each of the twelve rows counts the files that it names."""
    page = read_page("docs/development/changes.md")
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| (\d+) \| \d+ \|$", page, re.MULTILINE)
    assert len(rows) == 12
    assert [len(set(re.findall(r"`[^`]+`", files))) for files, _ in rows] == [int(count) for _, count in rows]


DRAW = """
import fl_server
from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance
from fl_server.rounds.state import RoundState
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_spec
from protos.run_file import parse_run

table = {"task": {"name": "digits"}, "round": {"clients_per_round": 3, "cohort_multiple": 4}}
policy = from_spec(parse_run(table)).policy()
_, (attempt,) = advance(RoundState(policy, 1), ev.RosterChanged(tuple(map(str, range(9))), settled=True))
print(fl_server.__file__, len(attempt.cohort))
"""


def add_run_field(copy: ChangedCopy) -> None:
    """`round.cohort_multiple`: the number of clients that are drawn is rounded up to a multiple of it."""
    field = "  optional uint32 min_accepted = 21;\n"
    copy.put("protos/fl/v1/admin.proto", field, f"{field}  // Made up.\n  optional uint32 cohort_multiple = 999;\n")
    field = "    min_accepted: int | None = Field(default=None, ge=1, le=MAX_COUNT)\n"
    copy.put(
        "fl_server/run_settings/sections.py",
        field,
        f"{field}    cohort_multiple: int = Field(default=1, ge=1, le=MAX_COUNT)\n",
    )
    passed = "            min_accepted=section.least,\n"
    copy.put(
        "fl_server/run_settings/config.py", passed, f"{passed}            cohort_multiple=section.cohort_multiple,\n"
    )
    field = "    deadline_s: float = 600.0\n"
    copy.put("fl_server/rounds/state.py", field, f"{field}    cohort_multiple: int = 1\n")
    copy.put(
        "fl_server/rounds/selecting.py",
        "    return math.ceil(round(wanted * state.draws_per_update, 6))\n",
        "    multiple = state.policy.cohort_multiple\n"
        "    return multiple * math.ceil(round(wanted * state.draws_per_update, 6) / multiple)\n",
    )
    copy.run("-m", "grpc_tools.protoc", "-I", ".", "--python_out=.", "protos/fl/v1/admin.proto")


def test_a_run_field_needs_the_files_of_its_row(tmp_path: Path) -> None:
    """In a copy with a made-up field, a run's file sets what the core draws."""
    copy = ChangedCopy(tmp_path)
    add_run_field(copy)
    assert copy.files == files_of_change("a run field")
    place, drawn = copy.run("-c", DRAW).split()
    assert (Path(place).parents[1], drawn) == (tmp_path, "4")


@pytest.mark.slow
def test_a_run_field_keeps_the_core(tmp_path: Path) -> None:
    """The tests of rounds, of a run's settings and a simulated run pass in the copy with the made-up field."""
    copy = ChangedCopy(tmp_path)
    add_run_field(copy)
    copy.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *CORE, "tests/fl_server/rounds")


CORE = ("tests/deterministic/test_planted.py::test_lives_of_the_core_keep_every_invariant",
        "tests/fl_ops/simulate/test_as_a_library.py")  # fmt: skip

LIFE = """
import fl_server
from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance
from fl_server.rounds.state import Phase, RoundPolicy, RoundState

state, phases = RoundState(RoundPolicy(seed=1), 1), []
for event in (ev.RosterChanged(("a",), settled=True), ev.UpdateAdmitted("a", b"digest"), ev.StepComputed(),
              ev.ModelChecked(), ev.ModelCommitted(), ev.Evaluated("server", 0, {})):
    state, _ = advance(state, event)
    phases.append(state.phase.value)
print(fl_server.__file__, *phases)
"""


ROUNDS = "fl_server/rounds"
STEPPING = '    STEPPING = "stepping"\n'
EVENT = "@dataclass(frozen=True, slots=True)\nclass StepComputed"
EFFECT = "@dataclass(frozen=True, slots=True)\nclass Commit:"
RULE = "    (Phase.STEPPING, ev.StepComputed): "
COLLECTING = "from fl_server.rounds.collecting import (\n"
HANDLER = "            effects.ComputeStep: parts.computation.compute_model,\n"
COMMIT = "    async def commit(self, command: effects.Commit) -> None:\n"
SIMULATED = "            case Phase.COMMITTING:\n"
PHASE = (
    (f"{ROUNDS}/state.py", STEPPING, f'{STEPPING}    CHECKING = "checking"\n'),
    (f"{ROUNDS}/events.py", EVENT, f"@dataclass(frozen=True, slots=True)\nclass ModelChecked:\n    pass\n\n\n{EVENT}"),
    (f"{ROUNDS}/events.py", "| StepComputed |", "| StepComputed | ModelChecked |"),
    (f"{ROUNDS}/effects.py", EFFECT, f"@dataclass(frozen=True, slots=True)\nclass CheckModel:\n    pass\n\n\n{EFFECT}"),
    (f"{ROUNDS}/effects.py", "| ComputeStep |", "| ComputeStep | CheckModel |"),
    (f"{ROUNDS}/machine.py", f"{RULE}stepped,\n", f"{RULE}check,\n    (Phase.CHECKING, ev.ModelChecked): stepped,\n"),
    (f"{ROUNDS}/machine.py", COLLECTING, f"from fl_server.rounds.checking import check\n{COLLECTING}"),
    ("fl_server/run/effects.py", HANDLER, f"{HANDLER}            effects.CheckModel: parts.computation.check,\n"),
    (
        "fl_server/run/computation.py",
        COMMIT,
        (
            "    async def check(self, command: effects.CheckModel) -> None:\n"
            f"        self._control.post(ev.ModelChecked())\n\n{COMMIT}"
        ),
    ),
    ("fl_server/run/run.py", "Phase.STEPPING, Phase.COMMITTING", "Phase.STEPPING, Phase.CHECKING, Phase.COMMITTING"),
    (
        "fl_ops/simulate/simulation.py",
        SIMULATED,
        f"            case Phase.CHECKING:\n                return ev.ModelChecked()\n{SIMULATED}",
    ),
    ("fl_web/facts/words.py", '"stepping", "committing"', '"stepping", "checking", "committing"'),
)
"""File, text, and the text in its place."""


def add_phase(copy: ChangedCopy) -> None:
    """The phase "checking" between the server step and the commit. Its work, a check of the model, does nothing."""
    copy.add(f"{ROUNDS}/checking.py", CHECKING)
    for change in PHASE:
        copy.put(*change)


CHECKING = '''"""The phase between the server step and the commit."""

from __future__ import annotations

from dataclasses import replace

from fl_server.rounds.effects import CheckModel
from fl_server.rounds.events import StepComputed
from fl_server.rounds.state import Phase, Result, RoundState


def check(state: RoundState, event: StepComputed) -> Result:
    """Check the new model."""
    del event
    return replace(state, phase=Phase.CHECKING), (CheckModel(),)
'''


def test_a_phase_needs_the_files_of_its_row(tmp_path: Path) -> None:
    """In a copy with a made-up phase, a round of the core passes through it."""
    copy = ChangedCopy(tmp_path)
    add_phase(copy)
    assert copy.files == files_of_change("a round phase")
    place, *phases = copy.run("-c", LIFE).split()
    assert Path(place).parents[1] == tmp_path
    assert phases == ["collecting", "stepping", "checking", "committing", "evaluating", "ended"]


@pytest.mark.slow
def test_a_phase_keeps_the_core(tmp_path: Path) -> None:
    """Lives of the core, simulated runs and a networked run that equals one pass through the made-up phase."""
    copy = ChangedCopy(tmp_path)
    add_phase(copy)
    checks, phases = "tests/deterministic/core_checks.py", "Phase.STEPPING, Phase.COMMITTING"
    copy.put(checks, phases, phases.replace(",", ", Phase.CHECKING,"), part_of_change=False)
    driver = "tests/deterministic/core_driver.py"  # the note below the table names it
    copy.put(driver, "            case fx.Commit():\n", CHECK + "            case fx.Commit():\n", part_of_change=False)
    ends = '        elif kind == "commit":\n'
    copy.put(
        driver,
        ends,
        f'        elif kind == "check":\n            yield from self.take(ev.ModelChecked())\n{ends}',
        part_of_change=False,
    )
    networked = "tests/integration/runs/test_simulation.py::test_a_simulated_run_is_the_networked_run[fedavg]"
    copy.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *CORE, networked)


CHECK = '            case fx.CheckModel():\n                self.work.append("check")\n'
