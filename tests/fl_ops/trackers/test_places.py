"""Event files and MLflow's stores: what is there is not added again, whatever happened before."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_ops.errors import Refused, UsageError
from fl_ops.simulate.run_files import SimulatedStates
from fl_ops.trackers import opening
from fl_ops.trackers.facts import EndFacts, RoundFacts, RunFacts, dotted
from fl_ops.trackers.ledger import run_facts
from fl_ops.trackers.opening import Trackers
from fl_web.facts.rounds import grouped, last_values, metric_groups
from protos.fl.v1 import admin_pb2
from tests.processes.process import ROOT
from tests.processes.tracker_readers import Values, mlflow_client, mlflow_run, mlflow_values, tensorboard_values

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own imports

RUN = RunFacts("digits-1", "digits-1, created then", {"local.learning_rate": "0.1", "stop.rounds": "3"}, 1000.0)


def facts(number: int, **values: float) -> RoundFacts:
    """A round with these values in the group of evaluations."""
    return RoundFacts(number, 1000.0 + number, {f"evaluation/{name}": value for name, value in values.items()})


class Place:
    """One of the two places, and its own reader."""

    def __init__(self, kind: str, folder: Path) -> None:
        uri = (folder / "mlruns").as_uri()
        self.trackers = Trackers(folder) if kind == "tensorboard" else Trackers(mlflow=uri)
        self._folder, self._uri, self._kind = folder, uri, kind

    def values(self) -> Values:
        """What is there."""
        if self._kind == "tensorboard":
            return tensorboard_values(self._folder / RUN.name)
        return mlflow_values(self._uri, RUN.name)

    def write(self, *rounds: RoundFacts) -> int:
        """As one process does: open, write, close. Returns the number of new values."""
        with self.trackers.opened(RUN) as (place,):
            return sum(place.write(facts) for facts in rounds)


@pytest.fixture(params=["tensorboard", "mlflow"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each place, empty."""
    return Place(request.param, tmp_path)


@pytest.mark.parametrize("name", ["../../escaped", "/x", "..", "", ".hidden", "-rf", "a/b", "a\\b", "a\n", "x" * 201])
def test_a_name_from_a_coordinator_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    """Neither as a run's id from a coordinator, nor as a folder of event files, nor as a client of a ledger."""
    place = tmp_path / "one" / "two"
    expected = "that can be the name of a file"
    with pytest.raises(Refused, match=f"expected a run's id {expected}"):
        run_facts(admin_pb2.RunStatus(run_id=name))
    with pytest.raises(Refused, match=expected), Trackers(place).opened(replace(RUN, name=name)):
        pass
    with pytest.raises(Refused, match=f"expected a client's id {expected}"):
        SimulatedStates(place).remove(name)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (tmp_path / "escaped").exists()


def test_nothing_is_added_twice(place: Place) -> None:
    """A later call adds what is new: another round, and a metric that an earlier round did not have."""
    assert place.write(facts(0, accuracy=0.5), facts(1, accuracy=0.75)) == 2
    assert place.write(facts(0, accuracy=0.5, loss=1.5), facts(1, accuracy=0.75), facts(2, accuracy=0.875)) == 2
    assert place.write(facts(2, accuracy=0.875)) == 0
    assert place.values() == {
        ("evaluation/accuracy", 0): 0.5, ("evaluation/accuracy", 1): 0.75, ("evaluation/accuracy", 2): 0.875,
        ("evaluation/loss", 0): 1.5,
    }  # fmt: skip


def test_an_odd_name_of_a_metric(place: Place) -> None:
    """A task may name its metrics as it likes; MLflow allows fewer characters, and the name is the same every time."""
    for count in (1, 0):
        assert place.write(RoundFacts(0, 1.0, {"evaluation/F1 [macro]": 0.5})) == count
    assert len(place.values()) == 1


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_record_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    """A process that was killed in the midst of a write leaves part of a record: the next call adds the value again."""
    place = Place("tensorboard", tmp_path)
    place.write(facts(0, accuracy=0.5), facts(1, accuracy=0.75))
    (file,) = (tmp_path / RUN.name).glob("*tfevents*")
    os.truncate(file, file.stat().st_size - cut)
    assert place.write(facts(0, accuracy=0.5), facts(1, accuracy=0.75)) == 1
    assert place.values() == {("evaluation/accuracy", 0): 0.5, ("evaluation/accuracy", 1): 0.75}


def test_settings_for_tensorboard(tmp_path: Path) -> None:
    """Its pages of text and of hyperparameters have each setting, written once."""
    place = Place("tensorboard", tmp_path)
    for number in range(2):
        place.write(facts(number, accuracy=0.5))
    from tensorboard.backend.event_processing import event_accumulator  # noqa: PLC0415 - slow

    reader = event_accumulator.EventAccumulator(str(tmp_path / RUN.name), {"tensors": 0})
    reader.Reload()
    assert len(reader.Tensors("settings")) == 1
    assert b"| local.learning_rate | 0.1 |" in reader.Tensors("settings")[0].tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in reader.summary_metadata


def test_two_processes_at_once(tmp_path: Path) -> None:
    """The second one is refused: both would find the same values missing."""
    trackers = Trackers(tmp_path)
    with trackers.opened(RUN), pytest.raises(Refused, match="another process writes"), trackers.opened(RUN):
        pass
    with trackers.opened(RUN):
        pass


def test_another_run_of_the_same_name(tmp_path: Path) -> None:
    """Two coordinators may have a run digits-1: their event files would be read as one run."""
    other = replace(RUN, identity="digits-1, created later")
    with Trackers(tmp_path).opened(RUN):
        pass
    with pytest.raises(UsageError, match="another run of this name"), Trackers(tmp_path).opened(other):
        pass


def test_a_run_that_was_extended(tmp_path: Path) -> None:
    """MLflow's parameters cannot change: the new limit is a tag, and the entry runs again until the new end."""
    uri = (tmp_path / "mlruns").as_uri()
    with Trackers(mlflow=uri).opened(RUN) as (place,):
        place.finish(EndFacts("completed", "3 rounds", 1003.0))
    assert mlflow_run(uri, RUN.name).info.status == "FINISHED"
    with Trackers(mlflow=uri).opened(replace(RUN, settings={**RUN.settings, "stop.rounds": "5"})) as (place,):
        place.reopen()
        run = mlflow_run(uri, RUN.name)
        assert (run.info.status, run.data.params["stop.rounds"], run.data.tags["stop.rounds"]) == ("RUNNING", "3", "5")
        place.finish(EndFacts("failed", "diverged", 1005.0))
    assert mlflow_run(uri, RUN.name).info.status == "FAILED"


def test_a_model_is_logged_once(tmp_path: Path) -> None:
    """A place wants a model until it has it, and another one under the same name again."""
    uri, file = (tmp_path / "mlruns").as_uri(), tmp_path / "best.safetensors"
    file.write_bytes(b"model")
    with Trackers(mlflow=uri).opened(RUN) as (place,):
        assert place.lacks_model("best", "blake3:1")
        place.add_model(file, "blake3:1")
    with Trackers(mlflow=uri).opened(RUN) as (place,):
        assert not place.lacks_model("best", "blake3:1")
        assert place.lacks_model("best", "blake3:2")
    artifacts = mlflow_client(uri).list_artifacts(mlflow_run(uri, RUN.name).info.run_id, "model")
    assert [artifact.path for artifact in artifacts] == ["model/best.safetensors"]


@pytest.mark.parametrize("extra", ["tensorboard", "mlflow"])
def test_without_the_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra, before any work."""
    monkeypatch.setattr(opening, "find_spec", lambda name: None if name == extra else find_spec(name))
    trackers = Trackers(Path("runs")) if extra == "tensorboard" else Trackers(mlflow="http://127.0.0.1:1")
    with pytest.raises(UsageError, match=rf"pip install 'impetus-fl\[{extra}\]'"):
        trackers.check()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="file/digits-1 cannot be written"), Trackers(tmp_path / "file").opened(RUN):
        pass


def test_an_address_with_a_password() -> None:
    """It is in no output and in no error."""
    from fl_ops.trackers.mlflow_runs import without_password  # noqa: PLC0415 - MLflow takes a second

    assert without_password("MLflow at http://ann:se:cret@host:5000/x fails") == "MLflow at http://host:5000/x fails"
    uri = "nowhere://ann:secret@host"
    with pytest.raises(Refused, match="nowhere://host") as error, Trackers(mlflow=uri).opened(RUN):
        pass
    assert "secret" not in str(error.value)


def test_names_of_values() -> None:
    """The groups of TensorBoard's page; None is no value."""
    metrics = metric_groups({"accuracy": 0.5, "clients_accuracy_mean": 0.4, "clients_evaluated": 3})
    epochs = last_values([{"loss": 2.0}, {"loss": 1.0}])
    assert {**grouped({**metrics, "training": {"loss": None}}), **epochs} == {
        "evaluation/accuracy": 0.5, "clients/accuracy_mean": 0.4, "clients/evaluated": 3.0,
        "training/last_epoch_loss": 1.0,
    }  # fmt: skip


def test_settings_as_dotted_names() -> None:
    """Whole numbers of a Struct are floats on the wire and whole numbers here; unset settings are left out."""
    nested = {"stop": {"rounds": 3.0, "target": None}, "labels": {}, "seed": "7", "rates": [1, 2], "name": ""}
    assert dotted(nested) == {"stop.rounds": "3", "seed": "7", "rates": "[1, 2]"}


def test_tensorboard_needs_no_tensorflow() -> None:
    """Neither does it load torch."""
    code = "import sys, fl_ops.trackers.tensorboard_files; print({'tensorflow', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
