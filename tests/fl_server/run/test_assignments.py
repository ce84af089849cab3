"""The assignments that clients receive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from google.protobuf.json_format import MessageToDict

import algorithms as fl
from fl_server.aggregation.outgoing import Outgoing, make_broadcast
from fl_server.rounds.sampling import training_seed
from fl_server.run.assignments import RoundPosition, RoundWork, common_assignment, for_client
from protos.codec import Layout
from protos.fl.v1.tensor_pb2 import ENCODING_INT8, ENCODING_PLAIN, ENCODING_TOP_K, RESOURCE_KIND_MODEL
from protos.fl.v1.training_pb2 import PAYLOAD_KIND_DELTA, Assignment
from tests.fl_server.harness import TASK, run_config

MODEL = {"w": torch.zeros(2)}
BROADCAST = make_broadcast(Outgoing(RESOURCE_KIND_MODEL, MODEL, Layout.of(MODEL)), 8)

FEDCM = fl.build("fedcm", alpha=0.3)


def make_assignment(
    client: str = "a", attempt: int = 0, seconds_left: float = 1.5, method: fl.Algorithm = FEDCM, **sections: Any
) -> Assignment:
    """The assignment of a client in round 3."""
    config = run_config(**sections)
    work = RoundWork("r", config, method, ("1", "sha256:ab"), [BROADCAST], 1000, 4)
    common = common_assignment(work, RoundPosition(3, 0, attempt, seconds_left))
    return for_client(common, training_seed(config.seed, 3, client), None)


def test_an_assignment_has_all_that_a_client_needs() -> None:
    """Key, task, resources, training settings and expected payloads."""
    local = {"learning_rate": 0.5, "learning_rate_decay": 0.5, "batch_size": 7, "weight_decay": 0.1}
    work = make_assignment(local=local, population=9)
    assert (work.key.run_id, work.key.round, work.key.exchange, work.attempt) == ("r", 3, 0, 0)
    assert (work.task, work.fingerprint.version, work.fingerprint.source) == (TASK, "1", "sha256:ab")
    assert list(work.resources) == [BROADCAST.resource]
    assert (list(work.payloads), list(work.upload_encodings)) == ([PAYLOAD_KIND_DELTA], [ENCODING_PLAIN])
    assert (work.state_epoch, work.max_update_bytes, work.deadline.ToMilliseconds()) == (4, 1000, 1500)
    training = work.training
    assert (training.learning_rate, training.batch_size, training.weight_decay) == (0.5 * 0.5**3, 7, 0.1)
    assert (training.population, training.max_gradient_norm) == (9, 0.0)
    assert training.algorithm.name == "fedcm"
    assert MessageToDict(training.algorithm.parameters) == dict(FEDCM.parameters)


def test_the_work_does_not_depend_on_the_attempt() -> None:
    """Only the attempt's number differs, which is for logs: a second attempt gives the same bits."""
    first, second = make_assignment(), make_assignment(attempt=5)
    assert second.attempt == 5
    second.attempt = 0
    assert first == second


def test_every_client_has_its_own_seed() -> None:
    """The seed is a function of run, round and client."""
    assert make_assignment("a").training.seed == training_seed(7, 3, "a")
    assert len({make_assignment(client).training.seed for client in "abc"}) == 3


@pytest.mark.parametrize(
    ("local", "work", "amount"),
    [({"steps": 5}, "local_steps", 5), ({"epochs": 3}, "local_epochs", 3), ({}, "local_epochs", 1)],
)
def test_the_amount_of_work(local: dict[str, int], work: str, amount: int) -> None:
    """Steps or epochs, one epoch by default; exactly one of the two is set."""
    training = make_assignment(local=local).training
    assert (training.WhichOneof("work"), getattr(training, work)) == (work, amount)


@pytest.mark.parametrize(("objective", "sent"), [("uniform", 0), ("examples", 70)])
def test_only_a_weighted_objective_sends_the_examples_of_the_population(objective: str, sent: int) -> None:
    """The weights of steps of another objective do not depend on it."""
    method = fl.build("feddyn", objective=objective)
    training = make_assignment(method=method, population=9, population_examples=70).training
    assert (training.population, training.population_examples) == (9, sent)


def test_a_deadline_that_has_passed_is_zero() -> None:
    """It is never negative."""
    assert make_assignment(seconds_left=-3.0).deadline.ToMilliseconds() == 0


def test_an_assignment_has_the_values_of_its_round() -> None:
    """Round 3 of 5 planned ones: alpha has gone three quarters of its way, eta_g has passed one milestone.

    The values are in the parameters, which every daemon reads. The schedules are not sent.
    """
    schedules = {
        "alpha": {"kind": "linear", "end": 0.7},
        "eta_g": {"kind": "step", "milestones": [3, 4], "factor": 0.5},
    }
    work = make_assignment(algorithm={"name": "fedcm", "schedules": schedules}, stop={"rounds": 9}, planned_rounds=5)
    sent = work.training.algorithm
    assert MessageToDict(sent.parameters) == {**FEDCM.parameters, "alpha": pytest.approx(0.6), "eta_g": 0.5}
    assert not sent.schedules


def test_an_assignment_names_the_encoding_of_the_update() -> None:
    """And for a sparse one its fraction."""
    work = make_assignment(encodings={"update": "topk", "fraction": 0.25})
    assert (list(work.upload_encodings), work.upload_fraction) == ([ENCODING_TOP_K], 0.25)
    work = make_assignment(encodings={"update": "int8"})
    assert (list(work.upload_encodings), work.upload_fraction) == ([ENCODING_INT8], 0.0)
