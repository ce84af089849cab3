"""docs/configuration.md is the output of its script, and the script's fixed texts are true."""

from __future__ import annotations

import inspect
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from docs.source import configuration, configuration_texts
from docs.source.keys import message_comments, sections
from fl_client.settings.config import ClientConfig
from fl_ops.admin.settings import Layer, from_file
from fl_server.run_settings.config import RunConfig
from fl_server.settings.config import ServerConfig
from fl_tasks.partitioning.spec import PartitionSpec
from protos.fl.v1 import admin_pb2
from protos.run_file import parse_run

TASK = {"name": "digits"}


def test_the_page_is_up_to_date() -> None:
    """Run `python -m docs.source.configuration` after a change of a setting and check the difference."""
    assert configuration.PAGE.read_text(encoding="utf-8") == configuration.page()


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """A run of the task with these sections."""
    return RunConfig.model_validate({"task": TASK, **sections})


@pytest.mark.parametrize("section", ["", *sections(RunConfig)])
def test_a_runs_file_its_message_and_its_model_have_the_same_keys(section: str) -> None:
    """What the page lists from the model can be written in the file, for the contract has a field of each name."""
    model = sections(RunConfig)[section] if section else RunConfig
    message: Any = admin_pb2.RunSpec.DESCRIPTOR
    if section:
        message = message.fields_by_name[section].message_type
    assert set(model.model_fields) == set(message.fields_by_name)


def test_every_field_of_a_run_has_a_comment() -> None:
    """The meanings on the page are the contract's own; none of them is empty."""
    messages = [f"{name.title().replace('_', '')}Spec" for name in sections(RunConfig) if name != "algorithm"]
    assert all(text for message in ["RunSpec", *messages] for text in message_comments(message).values())


def test_defaults_that_depend_on_others_are_as_the_page_says() -> None:
    """Of 5 clients a round all must be there and 3 are a quorum; with Bernoulli sampling one and half of the goal."""
    fixed = run_config(round={"clients_per_round": 5}).policy()
    assert (fixed.min_clients, fixed.quorum) == (5, 3)
    drawn = run_config(round={"sampling": "bernoulli", "clients_per_round": 5}).policy()
    assert (drawn.min_clients, drawn.quorum) == (1, 0)
    assert (run_config(local={}).local.epochs, run_config().base_id()) == (1, "digits-fedcm")
    assert run_config(local={"steps": 3}).local.epochs is None


def test_the_smallest_files_are_what_the_page_calls_required() -> None:
    """In addition to the plain-text switch a coordinator needs one key, and a daemon four with its task's name."""
    assert ServerConfig.model_validate({"state_dir": "s", "insecure": True}).metrics_listen == "127.0.0.1:7072"
    daemon = {"client_id": "a", "server": "127.0.0.1:7070", "state_dir": "a", "task": TASK, "insecure": True}
    assert ClientConfig.model_validate(daemon).shard.index is None
    assert parse_run({"task": TASK}).task.name == "digits"


def test_the_documented_keys_of_a_partition_are_complete() -> None:
    """The table of partition keys has each argument of a partition, in its order."""
    assert list(configuration_texts.PARTITION) == list(inspect.signature(PartitionSpec).parameters)


def test_the_operators_file_takes_the_keys_of_the_page(tmp_path: Path) -> None:
    """Each key of the table is a field of the settings, and a file with all of them is read."""
    keys = [field.name for field in fields(Layer) if field.name != "token"]  # a secret, in the environment only
    assert list(configuration_texts.FL) == keys
    values = {
        key: "true" if words.startswith("boolean") else "'a:1'" for key, (words, _) in configuration_texts.FL.items()
    }
    text = "\n".join(f"{key} = {value}" for key, value in values.items())
    assert tomllib.loads(text).keys() == configuration_texts.FL.keys()
    (tmp_path / "fl.toml").write_text(text)
    read = vars(from_file(tmp_path / "fl.toml"))
    assert None not in [read[key] for key in keys]
