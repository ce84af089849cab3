"""The work that a client is sent."""

from __future__ import annotations

import pytest
import torch
from google.protobuf.json_format import MessageToDict

import algorithms as fl
from fl_server.assignments import Order, Place, assignment
from fl_server.broadcast import Outgoing, make_broadcast
from fl_server.sampling import training_seed
from protos.codec import Layout
from protos.fl.v1.tensor_pb2 import ENCODING_PLAIN, RESOURCE_KIND_MODEL
from protos.fl.v1.training_pb2 import PAYLOAD_KIND_DELTA
from tests.fl_server.harness import TASK, run_config

MODEL = {"w": torch.zeros(2)}
BROADCAST = make_broadcast(Outgoing(RESOURCE_KIND_MODEL, MODEL, Layout.of(MODEL)), 8)

FEDCM = fl.build("fedcm", alpha=0.3)


def made(client="a", attempt=0, seconds_left=1.5, method=FEDCM, **sections):
    """Round 3's work for a client."""
    config = run_config(**sections)
    order = Order("r", config, method, ("1", "sha256:ab"), [BROADCAST], 1000, 4)
    return assignment(order, Place(3, 0, attempt, seconds_left), client)


def test_an_assignment_says_all_that_a_client_must_know():
    """Key, task, resources, how to train, and what is wanted back."""
    work = made(local={"learning_rate": 0.5, "learning_rate_decay": 0.5, "batch_size": 7, "weight_decay": 0.1},
                population=9)  # fmt: skip
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


def test_the_work_does_not_depend_on_the_attempt():
    """Only what is for logs does: the same bits come of a second try."""
    first, second = made(), made(attempt=5)
    assert second.attempt == 5
    second.attempt = 0
    assert first == second


def test_every_client_has_its_own_seed():
    """A function of run, round and client."""
    assert made("a").training.seed == training_seed(7, 3, "a")
    assert len({made(client).training.seed for client in "abc"}) == 3


@pytest.mark.parametrize(
    ("local", "work", "amount"),
    [({"steps": 5}, "local_steps", 5), ({"epochs": 3}, "local_epochs", 3), ({}, "local_epochs", 1)],
)
def test_the_amount_of_work(local, work, amount):
    """Steps or epochs, one epoch if nothing is said; exactly one of them is set."""
    training = made(local=local).training
    assert (training.WhichOneof("work"), getattr(training, work)) == (work, amount)


def test_a_deadline_that_is_over_is_no_time():
    """Never a negative one."""
    assert made(seconds_left=-3.0).deadline.ToMilliseconds() == 0
