"""The client states of this device, one file for each run: SCAFFOLD's c_i, FedDyn's h_i.

A state belongs to the update that left it: to its run, round and digest, and to the epoch that it was made in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from algorithms.base import Memory
from fl_client import files, memory_file
from protos.digests import digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ClientState:
    """What this device keeps of a run's round that counted."""

    left_by: training_pb2.Outcome
    """Of the update that left it; its state_epoch is the one that the state was made in."""
    memory: Memory


class ClientStates:
    """Files of client states, written beside and renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = files.made(folder)

    def put(self, state: ClientState) -> None:
        """Keep a state in place of the run's earlier one; survives a power cut. Raises OSError."""
        data = memory_file.encode(state.left_by.SerializeToString(), [state.memory])
        files.write_whole(self._path(state.left_by.key.run_id), data, durable=True)

    def find(self, run_id: str) -> ClientState | None:
        """The run's state; None, and a line in the log unless there is none, if it cannot be read."""
        path = self._path(run_id)
        try:
            with path.open("rb") as file:
                facts, (memory,) = memory_file.decode(file, 1)
            return ClientState(training_pb2.Outcome.FromString(facts), memory)
        except FileNotFoundError:
            return None
        except (OSError, DecodeError, memory_file.Damaged) as error:
            log.error("state_unreadable", run=run_id, file=path.name, reason=str(error), todo="it is taken for lost")
            return None

    def left_by(self, run_id: str) -> training_pb2.Outcome | None:
        """Which update left the run's state, without reading the state."""
        return _left_by(self._path(run_id))

    def drop(self, run_id: str) -> None:
        """Forget a run's state; nothing happens when there is none."""
        self._path(run_id).unlink(missing_ok=True)

    def held(self) -> list[pb.HeldState]:
        """The runs with a state, and the epoch that it was made in."""
        read = (_left_by(path) for path in sorted(self._folder.glob("*.state")))
        return [pb.HeldState(run_id=it.key.run_id, state_epoch=it.state_epoch) for it in read if it is not None]

    def size_bytes(self) -> int:
        """On disk, of all states."""
        return sum(path.stat().st_size for path in self._folder.glob("*.state"))

    def _path(self, run_id: str) -> Path:
        # The run's id comes from the wire, so it is not trusted as a file name.
        return self._folder / f"{digest_of(run_id.encode()).hex()[:32]}.state"


def _left_by(path: Path) -> training_pb2.Outcome | None:
    try:
        with path.open("rb") as file:
            return training_pb2.Outcome.FromString(memory_file.read_facts(file))
    except (OSError, DecodeError, memory_file.Damaged):
        return None
