"""What TensorBoard's and MLflow's own readers find, and what the coordinator shows, as (name, step) -> value."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

Values = dict[tuple[str, int], float]


def tensorboard_values(folder: Path) -> Values:
    """The scalars of a run. Fails if one of them is there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415 - slow

    reader = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0})
    reader.Reload()
    found = [((tag, each.step), each.value) for tag in reader.Tags()["scalars"] for each in reader.Scalars(tag)]
    assert len(found) == len(dict(found)), "a value is there twice"
    return dict(found)


def mlflow_client(uri: str) -> Any:
    """MLflow's own client."""
    from mlflow.tracking import MlflowClient  # noqa: PLC0415 - slow, with warnings

    return MlflowClient(tracking_uri=uri)


def mlflow_run(uri: str, name: str) -> Any:
    """The one run of this name."""
    client = mlflow_client(uri)
    experiment = client.get_experiment_by_name("impetus")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`impetus.run_id` = '{name}'")
    return run


def mlflow_values(uri: str, name: str) -> Values:
    """The metrics of a run. Fails if one of them is there twice."""
    client, run = mlflow_client(uri), mlflow_run(uri, name)
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    found = [((key, each.step), each.value) for key, history in histories.items() for each in history]
    assert len(found) == len(dict(found)), "a value is there twice"
    return dict(found)


def shown_values(text: str) -> Values:
    """The numbers that `fl run show RUN --json` prints, under the names of docs/operation/trackers.md."""
    return {
        (name, each["round"]): float(value)
        for each in json.loads(text)["rounds"]
        for name, value in _shown(each).items()
    }


def _shown(summary: Mapping[str, Any]) -> dict[str, Any]:
    account, metrics = summary["account"], summary["metrics"]
    found = {
        "bytes/down": summary["bytes_down"], "bytes/up": summary["bytes_up"], "seconds/round": summary["seconds"],
        "cohort/accepted": summary["accepted"], "cohort/dropped": summary["dropped"],
        "cohort/attempts": summary["attempts"], "training/loss": summary["training_loss"],
    }  # fmt: skip
    for name, value in metrics.items():
        found[f"clients/{name[8:]}" if name.startswith("clients_") else f"evaluation/{name}"] = value
    found |= {f"norms/{name}": value for name, value in account["norms"].items()}
    found |= {f"seconds/{name}": value for name, value in account["seconds"].items()}
    found |= {f"cohort/{name}": count for name, count in account["assignments"].items() if name != "admitted"}
    return found | ({"norms/cosine": account["cosine"]} if "cosine" in account else {})


def as_float32(values: Values) -> Values:
    """The values as event files keep them."""
    return {key: struct.unpack("f", struct.pack("f", value))[0] for key, value in values.items()}
