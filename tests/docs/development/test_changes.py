"""docs/development/changes.md: its counts, and some of its changes, made in one copy of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.development.changed_copy import ChangedCopy, files_of_change
from tests.docs.pages import read_page

ADMIN = "protos/fl/v1/admin.proto"
SECTIONS = "fl_server/run_settings/sections.py"
ROUNDS = "fl_server/rounds"


def test_the_counts_of_usual_changes_are_those_of_their_files() -> None:
    """Each of the twelve rows counts the files that it names."""
    page = read_page("docs/development/changes.md")
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 12
    assert [len(set(re.findall(r"`[^`]+`", files))) for files, _ in rows] == [int(count) for _, count in rows]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> ChangedCopy:
    """A copy with all of the changes below."""
    made = ChangedCopy(tmp_path_factory.mktemp("tree"))
    for change in (add_run_field, add_clip, add_phase, add_command):
        change(made)
    made.run(
        "-m",
        "grpc_tools.protoc",
        "-I",
        ".",
        "--python_out=.",
        "--grpc_python_out=.",
        ADMIN,
        "protos/fl/v1/training.proto",
    )
    return made


def add_run_field(copy: ChangedCopy) -> None:
    """`round.cohort_multiple`: the number of clients that are drawn is rounded up to a multiple of it."""
    copy.begin("a run field")
    copy.after(ADMIN, "  optional uint32 min_accepted = 21;\n", "  optional uint32 cohort_multiple = 999;\n")
    copy.after(
        SECTIONS,
        "    min_accepted: int | None = Field(default=None, ge=1, le=MAX_COUNT)\n",
        "    cohort_multiple: int = Field(default=1, ge=1, le=MAX_COUNT)\n",
    )
    copy.after(f"{ROUNDS}/sampling.py", "    deadline_s: float = 600.0\n", "    cohort_multiple: int = 1\n")
    copy.put(
        f"{ROUNDS}/selecting.py",
        "    return math.ceil(round(wanted * state.draws_per_update, 6))\n",
        "    multiple = state.policy.cohort_multiple\n"
        "    return multiple * math.ceil(round(wanted * state.draws_per_update, 6) / multiple)\n",
    )


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


def test_a_run_field_needs_the_files_of_its_row(copy: ChangedCopy) -> None:
    """In the copy with a made-up field, a run's file sets what the core draws."""
    assert copy.files["a run field"] == files_of_change("a run field")
    place, drawn = copy.run("-c", DRAW).split()
    assert (Path(place).parents[1], drawn) == (copy.folder, "4")


def add_clip(copy: ChangedCopy) -> None:
    """`local.soft_gradient_norm`: S / (S + ||g||) is the factor of a gradient."""
    copy.begin("a clip on the device")
    copy.after(ADMIN, "  optional double max_gradient_norm = 7;\n", "  optional double soft_gradient_norm = 999;\n")
    copy.after(
        "protos/fl/v1/training.proto", "  double max_gradient_norm = 7;\n", "  double soft_gradient_norm = 999;\n"
    )
    copy.after(
        SECTIONS,
        "    max_gradient_norm: float = Field(default=0.0, ge=0, le=MAX_NUMBER)\n",
        "    soft_gradient_norm: float = Field(default=0.0, ge=0, le=MAX_NUMBER)\n",
    )
    copy.after("fl_tasks/own_loop.py", "    max_gradient_norm: float\n", "    soft_gradient_norm: float\n")
    rule = "algorithms/base.py"
    copy.after(rule, "    max_gradient_norm: float = 0.0\n", "    soft_gradient_norm: float = 0.0\n")
    clips = "self.max_gradient_norm > 0.0\n"
    copy.put(rule, clips, f"self.soft_gradient_norm > 0.0 or {clips}")
    factor = "        return (self.max_gradient_norm / (norm + 1e-6)).clamp(max=1.0)\n"
    copy.put(
        rule,
        factor,
        "        if self.soft_gradient_norm:\n"
        f"            return self.soft_gradient_norm / (self.soft_gradient_norm + norm)\n{factor}",
    )


STEP = """
import sys

import torch
import fl_ops
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation

sys.path.append("tests/fl_ops")  # the task
ROUND = {
    "task": {"name": "points:Points"}, "algorithm": {"name": "fedavg"},
    "stop": {"rounds": 1}, "evaluation": {"every": 0},
    "round": {"clients_per_round": 1}, "simulation": {"clients": 1},
}

def norm(clip, engine):
    local = {"steps": 1, "learning_rate": 1.0, "soft_gradient_norm": clip}
    run = prepare(parse_simulation({**ROUND, "local": local}), 1)
    with Simulation(run.config, run.clients, task=run.server_task, engine=engine) as simulation:
        before = {name: tensor.clone() for name, tensor in simulation.model().items()}
        list(simulation.rounds())
        return torch.cat([(tensor - before[name]).flatten() for name, tensor in simulation.model().items()]).norm()

lockstep = EngineOptions(batched=BatchedOptions())
print(fl_ops.__file__, *(float(norm(clip, engine)) for clip in (0.0, 0.01) for engine in (SEQUENTIAL, lockstep)))
"""


@pytest.mark.slow
def test_a_clip_needs_the_files_of_its_row(copy: ChangedCopy) -> None:
    """In the copy with a made-up clip, a run's file clips the gradient of a client alone and of one in lockstep."""
    assert copy.files["a clip on the device"] == files_of_change("a clip on the device")
    place, *norms = copy.run("-c", STEP).split()
    assert Path(place).parents[1] == copy.folder
    plain, plain_in_lockstep, *clipped = map(float, norms)
    assert plain_in_lockstep == pytest.approx(plain)
    assert clipped == [pytest.approx(0.01 * plain / (0.01 + plain), rel=1e-4)] * 2


COMPUTATION = "fl_server/run/computation.py"
STEPPING = '    STEPPING = "stepping"\n'
EVENT = "@dataclass(frozen=True, slots=True)\nclass StepComputed"
EFFECT = "@dataclass(frozen=True, slots=True)\nclass Commit:"
RULE = "    (Phase.STEPPING, ev.StepComputed): "
STEPPED = "committing.stepped,\n"
CHECKED = "    (Phase.CHECKING, ev.ModelChecked): "
MODULES = "from fl_server.rounds import buffer, "
HANDLER = "            effects.ComputeStep: self._compute_step,\n"
COMMIT = "    async def _commit_model(self, command: effects.Commit) -> None:\n"
WORK = "Phase.STEPPING, Phase.COMMITTING)\n"
SIMULATED = "            case Phase.COMMITTING:\n                self._committed(self.federation.commit(accepted))\n"
PHASE = (
    (f"{ROUNDS}/state.py", STEPPING, f'{STEPPING}    CHECKING = "checking"\n'),
    (f"{ROUNDS}/events.py", EVENT, f"@dataclass(frozen=True, slots=True)\nclass ModelChecked:\n    pass\n\n\n{EVENT}"),
    (f"{ROUNDS}/events.py", "| StepComputed |", "| StepComputed | ModelChecked |"),
    (f"{ROUNDS}/effects.py", EFFECT, f"@dataclass(frozen=True, slots=True)\nclass CheckModel:\n    pass\n\n\n{EFFECT}"),
    (f"{ROUNDS}/effects.py", "| ComputeStep |", "| ComputeStep | CheckModel |"),
    (f"{ROUNDS}/machine.py", f"{RULE}{STEPPED}", f"{RULE}checking.check,\n{CHECKED}{STEPPED}"),
    (f"{ROUNDS}/machine.py", MODULES, f"{MODULES}checking, "),
    (f"{ROUNDS}/state.py", WORK, f"Phase.CHECKING, {WORK}"),
    (COMPUTATION, HANDLER, f"{HANDLER}            effects.CheckModel: self._check_model,\n"),
    (
        COMPUTATION,
        COMMIT,
        (
            "    async def _check_model(self, command: effects.CheckModel) -> None:\n"
            f"        self._control.post(ev.ModelChecked())\n\n{COMMIT}"
        ),
    ),
    (
        "fl_ops/simulate/simulation.py",
        SIMULATED,
        f"            case Phase.CHECKING:\n                return ev.ModelChecked()\n{SIMULATED}",
    ),
)
"""File, text, and the text in its place."""


def add_phase(copy: ChangedCopy) -> None:
    """The phase "checking" between the server step and the commit. Its work, a check of the model, does nothing."""
    copy.begin("a round phase")
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

LIFE = """
import fl_server
from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState

state, phases = RoundState(RoundPolicy(seed=1), 1), []
for event in (ev.RosterChanged(("a",), settled=True), ev.UpdateAdmitted((("a", b"digest"),)), ev.StepComputed(),
              ev.ModelChecked(), ev.ModelCommitted(), ev.Evaluated("server", 0, {})):
    state, _ = advance(state, event)
    phases.append(state.phase.value)
print(fl_server.__file__, *phases)
"""


def test_a_phase_needs_the_files_of_its_row(copy: ChangedCopy) -> None:
    """In the copy with a made-up phase, a round of the core passes through it."""
    assert copy.files["a round phase"] == files_of_change("a round phase")
    place, *phases = copy.run("-c", LIFE).split()
    assert Path(place).parents[1] == copy.folder
    assert phases == ["collecting", "stepping", "checking", "committing", "evaluating", "ended"]


CALLS, FLEET = "fl_server/rpc/clients.py", "fl_server/clients/fleet.py"
COMMANDS = "fl_ops/commands/coordinator/clients.py"
RPC = "  rpc DrainClient(DrainClientRequest) returns (DrainClientResponse);\n"
MESSAGE = "message DrainClientResponse {\n"
ROW = '    "/fl.v1.Admin/DrainClient": _changing(_OPERATE, _CLIENT_ID, "reason", "undo"),\n'
CALL = "    async def DrainClient("
ACTION = "    async def forget(self, client_id: str, actor: str) -> bool:\n"
COMMAND = '@app.command(**examples("fl clients drain'


def add_command(copy: ChangedCopy) -> None:
    """`fl clients note`: an operator writes something about a client."""
    copy.begin("a command")
    copy.after(ADMIN, RPC, "  rpc NoteClient(NoteClientRequest) returns (DrainClientResponse);\n")
    fields = "message NoteClientRequest {\n  string client_id = 1;\n  string note = 2;\n}\n\n"
    copy.put(ADMIN, MESSAGE, fields + MESSAGE)
    copy.after("fl_server/rpc/methods.py", ROW, ROW.replace("Drain", "Note").replace('"reason", "undo"', '"note"'))
    copy.put(CALLS, CALL, f"{NOTE_CALL}\n{CALL}")
    copy.put(FLEET, ACTION, NOTE_ACTION + ACTION)
    copy.put(COMMANDS, COMMAND, NOTE_COMMAND + COMMAND)


NOTE_CALL = """
    async def NoteClient(self, request: pb.NoteClientRequest, context: Context) -> pb.DrainClientResponse:
        await self._clients.annotate(request.client_id, request.note, actor())
        return pb.DrainClientResponse(client=await self._client(request.client_id))
"""
NOTE_ACTION = """    async def annotate(self, client_id: str, note: str, actor: str) -> None:
        record = replace(self._fleet.records.get(client_id), note=one_line(note))
        await self._fleet.records.write(record, HistoryRecord(time.time(), actor, "client_noted", client_id, note))

"""
NOTE_COMMAND = """@app.command()
@admin_command
def note(context: Context, name: Client, text: str) -> None:
    with context.connect() as client:
        request = admin_pb2.NoteClientRequest(client_id=name, note=text)
        _show_client(context, client.call(request, admin_pb2.DrainClientResponse).client)


"""


def test_a_command_needs_the_files_of_its_row(copy: ChangedCopy) -> None:
    """Nobody has to add the made-up call to the operators' connection."""
    assert copy.files["a command"] == files_of_change("a command")


NOTE = """
import sys
from pathlib import Path
from tests.processes.process import Workspace, run_fl  # before grpc is imported
from tests.processes.federation import Coordinator

folder = Path(sys.argv[1])
folder.mkdir()
with Workspace(folder) as workspace:
    server = Coordinator(workspace).serve()
    connection = ("--server", str(server.settings["admin_listen"]), "--insecure")
    for action in (("ban", "edge-1", "--reason", "noise"), ("note", "edge-1", "in the cellar")):
        done = run_fl("clients", *action, *connection, folder=folder)
        assert done.returncode == 0, done.stderr
    print(done.stdout)
"""


@pytest.mark.slow
def test_a_made_up_command_reaches_the_coordinator(copy: ChangedCopy) -> None:
    """A coordinator of the copy does what `fl` of the copy asks for, and `fl` shows the answer."""
    assert "in the cellar" in copy.run("-c", NOTE, str(copy.folder / "processes"))


DRIVER, EFFECTS = "tests/deterministic/core_driver.py", "tests/deterministic/core_effects.py"
ENDS = '        elif kind == "commit":\n'
CHECK = '            case fx.CheckModel():\n                self.work.append("check")\n'
CHECKED = '        elif kind == "check":\n            yield from self.take(ev.ModelChecked())\n'


@pytest.fixture(scope="module")
def driven(copy: ChangedCopy) -> ChangedCopy:
    """The copy in which the driver of the deterministic tests knows the made-up phase, as the notes say."""
    copy.begin("what the notes name")
    checks, phases = "tests/deterministic/core_checks.py", "Phase.STEPPING, Phase.COMMITTING"
    copy.put(checks, phases, phases.replace(",", ", Phase.CHECKING,"))
    copy.put(EFFECTS, "            case fx.Commit():\n", f"{CHECK}            case fx.Commit():\n")
    copy.put(DRIVER, ENDS, f"{CHECKED}{ENDS}")
    return copy


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tests",
    [
        "tests/deterministic/test_planted.py::test_lives_of_the_core_keep_every_invariant",
        "tests/fl_ops/simulate/test_as_a_library.py",
        "tests/integration/runs/test_simulation.py::test_a_simulated_run_is_the_networked_run[fedavg]",
    ],
    ids=["lives", "simulated", "networked"],
)
def test_the_changes_keep_the_core(driven: ChangedCopy, tests: str) -> None:
    """Lives of the core, simulated runs and a networked run that equals one pass in the copy with all changes."""
    driven.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow", "--timeout", "800", tests
    )
