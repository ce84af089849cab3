"""Where a run keeps its data, updates and client states, by their sizes."""

from __future__ import annotations

from collections.abc import Mapping

from fl_client.training.data import LocalTask
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.engines.pool import check_room
from fl_ops.simulate.held_states import HeldStates
from fl_ops.simulate.run_files import ScratchFolder, SimulatedStates
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import keeps_client_state
from fl_server.run.evaluations import needs_metric
from fl_tasks import Examples
from fl_tasks.data.forms import Data


def place_held_out(server: Engine, clients: Mapping[str, LocalTask], options: EngineOptions) -> None:
    """Read the server's held-out examples if they are needed, before processes start that can share them.

    On a GPU they stay there, as the clients' examples do. Raises TaskError, and Refused without room for both.
    """
    if not (server.config.evaluation.every or needs_metric(server.config)):
        return
    model, device = server.model.in_process, options.device
    if device.type != "cpu":
        whole = clients.whole if isinstance(clients, SimulatedClients) else None
        check_room(device, {
            "the examples of all clients": _bytes_of(whole),
            "the server's held-out examples": _bytes_of(model.read_held_out()),
        })  # fmt: skip
    if options.workers > 1 or device.type != "cpu":
        model.held_out()


def _bytes_of(data: Data | None) -> int:
    """Bytes that stay on a device; other data is read batch by batch."""
    return data.inputs.nbytes + data.targets.nbytes if isinstance(data, Examples) else 0


class Folders:
    """The folders of a round's updates and of client states, until `cleanup`."""

    def __init__(self, server: Engine, clients: Mapping[str, LocalTask], options: EngineOptions) -> None:
        config, of_round = server.config, sum(shape.size_bytes for shape in server.shapes)
        self._updates = ScratchFolder("updates", int(of_round * config.policy().drawn_of(len(clients))))
        self.path = self._updates.path
        """The folder for updates, and for other files of the engine."""
        keeps = keeps_client_state(config, server.algorithm)
        # Each state with the next one.
        self._states = ScratchFolder("states", 2 * server.layout.size_bytes * len(clients) if keeps else 0)
        alone = options.batched is not None and options.ranks is None
        path = self._states.path
        self.states = HeldStates(path, clients, options.device) if alone else SimulatedStates(path)

    def cleanup(self) -> None:
        """Remove the folders. A second call does nothing."""
        self._updates.cleanup()
        self._states.cleanup()
