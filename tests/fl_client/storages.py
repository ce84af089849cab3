"""Rounds of a run with client states: updates, next states, outcomes and assignments by their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fl_client.storage.client_state_store import NextState
from fl_client.storage.device_storage import DeviceStorage
from fl_client.storage.pending_updates import Update, work_digest
from protos.digests import digest_message, digest_of
from protos.fl.v1 import training_pb2


def key(round_number: int, run_id: str = "run", exchange: int = 0) -> training_pb2.ExchangeKey:
    """The key of a round."""
    return training_pb2.ExchangeKey(run_id=run_id, round=round_number, exchange=exchange)


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    """A client state; the tensor's name has characters that a path must not have."""
    return {"c_i": {"layer/0.weight": torch.full((3,), float(value))}}


def assignment(
    round_number: int,
    counted: training_pb2.Outcome | None = None,
    epoch: int = 0,
    run_id: str = "run",
    exchange: int = 0,
) -> training_pb2.Assignment:
    """Work for a round, after the update of an earlier one counted."""
    return training_pb2.Assignment(key=key(round_number, run_id, exchange), counted=counted, state_epoch=epoch)


def update(
    round_number: int, epoch: int = 0, run_id: str = "run", exchange: int = 0, work: bytes | None = None
) -> Update:
    """The update of a round; its bytes contain round and epoch."""
    data = bytes([round_number, epoch] * 4)
    header = training_pb2.UpdateHeader(
        key=key(round_number, run_id, exchange),
        size_bytes=len(data),
        digest=digest_message(digest_of(data)),
        state_epoch=epoch,
    )
    return Update(work or work_digest(assignment(round_number, None, epoch, run_id, exchange)), header, (data,))


def leaves(round_number: int) -> NextState:
    """Next states of round t: 10 t if the update counts completely, 0 if it does not count."""
    return NextState(state(10 * round_number), state(0))


def outcome(round_number: int, epoch: int = 0, run_id: str = "run", **changes: Any) -> training_pb2.Outcome:
    """The update counted whole."""
    values = {
        "key": key(round_number, run_id),
        "digest": update(round_number, epoch, run_id).header.digest,
        "counted": True,
        "clip_factor": 1.0,
        "state_epoch": epoch,
    }
    return training_pb2.Outcome(**{**values, **changes})


def storage(folder: Path) -> DeviceStorage:
    """The storage of a daemon at its start."""
    return DeviceStorage(folder / "pending", folder / "states")
