"""Rounds of a run whose client keeps a state: updates, next states, outcomes and assignments by their numbers."""

from __future__ import annotations

import torch

from fl_client.next_state import NextState
from fl_client.shelf import Shelf
from fl_client.updates import Update, work_of
from protos.digests import digest_message, digest_of
from protos.fl.v1 import training_pb2


def key(round_number, run_id="run", exchange=0):
    """The key of a round."""
    return training_pb2.ExchangeKey(run_id=run_id, round=round_number, exchange=exchange)


def state(value):
    """A client state; the tensor's name has what a path must not have."""
    return {"c_i": {"layer/0.weight": torch.full((3,), float(value))}}


def assignment(round_number, counted=None, epoch=0, run_id="run", exchange=0):
    """Work for a round, after the update of an earlier one counted."""
    return training_pb2.Assignment(key=key(round_number, run_id, exchange), counted=counted, state_epoch=epoch)


def update(round_number, epoch=0, run_id="run", exchange=0, work=None):
    """The update that answers it; its bytes name round and epoch."""
    data = bytes([round_number, epoch] * 4)
    header = training_pb2.UpdateHeader(
        key=key(round_number, run_id, exchange),
        size_bytes=len(data),
        digest=digest_message(digest_of(data)),
        state_epoch=epoch,
    )
    return Update(work or work_of(assignment(round_number, None, epoch, run_id, exchange)), header, (data,))


def leaves(round_number):
    """State 10 t of a round t that counted whole, 0 of one of which nothing did."""
    return NextState(state(10 * round_number), state(0))


def outcome(round_number, epoch=0, run_id="run", **changes):
    """The update counted whole."""
    values = {
        "key": key(round_number, run_id),
        "digest": update(round_number, epoch, run_id).header.digest,
        "counted": True,
        "clip_factor": 1.0,
        "state_epoch": epoch,
    }
    return training_pb2.Outcome(**{**values, **changes})


def shelf(folder) -> Shelf:
    """What a daemon that starts finds in its state directory."""
    return Shelf(folder / "pending", folder / "states")
