"""The work of a rank other than 0: it has the run's data, and does what rank 0 orders."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable
from contextlib import ExitStack

import torch

from algorithms.outside_code import is_interrupt
from fl_ops.errors import UsageError
from fl_ops.simulate.clients import PreparedRun
from fl_ops.simulate.engines.engine import EngineContext, LocalEngine, Order
from fl_ops.simulate.engines.held import TrainedTogether
from fl_ops.simulate.ranks import messages
from fl_ops.simulate.ranks.group import Ranks
from fl_ops.simulate.run_files import ScratchFolder, SimulatedStates, UpdateFiles
from fl_tasks import fingerprint


def program_of(prepared: PreparedRun) -> str:
    """A digest of all that must be equal on all ranks: the run, its task's code, the clients and torch."""
    config = prepared.config.model_dump(mode="json")
    config["task"]["options"] = {}  # the folder of the data may differ
    sizes = [prepared.clients.size_of(client) for client in prepared.clients]
    facts = [config, list(prepared.clients), sizes, fingerprint(prepared.clients.task), torch.__version__]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def check_programs(ranks: Ranks, prepared: PreparedRun) -> None:
    """Raise UsageError on rank 0 if a rank has another run, code or data. Called on every rank before the run."""
    if ranks.rank:
        ranks.send(0, {"program": program_of(prepared)})
        return
    here = program_of(prepared)
    for rank in ranks.others:
        if ranks.receive(rank).head["program"] != here:
            raise UsageError(
                f"--distributed: expected the same file, data, task and torch on all ranks, and rank {rank} has others "
                "than rank 0"
            )


def serve(ranks: Ranks, prepared: PreparedRun, make: Callable[[EngineContext], LocalEngine]) -> None:
    """Do what rank 0 orders until the run ends. Raises TaskError if the model cannot be made here."""
    # A wait for a message cannot be interrupted, so the signals of torchrun end the process at once. The next
    # simulation of the same user removes the folder then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with ExitStack() as stack:
        scratch = ScratchFolder("rank", None)
        stack.callback(scratch.cleanup)
        states, updates = SimulatedStates(scratch.path / "states"), UpdateFiles(scratch.path)
        context = EngineContext(prepared.clients, prepared.clients.task, prepared.config, states, updates)
        engine = make(context)
        stack.callback(engine.close)
        while (message := ranks.receive(0)).head["do"] != messages.END:
            if message.head["do"] == messages.BEGIN:
                engine.begin(messages.receive_bundles(ranks, message))
            else:
                _answer(ranks, engine, messages.received_order(message, context), context)


def _answer(ranks: Ranks, engine: LocalEngine, order: Order, context: EngineContext) -> None:
    """Send the results when all work is done: rank 0 reads them after its own share."""
    try:
        done = list(engine.work(order))
    except BaseException as error:  # any error ends the run, as it does in one process
        if is_interrupt(error):
            raise
        messages.send_error(ranks, error)
        return
    for result in done:
        if isinstance(result, TrainedTogether):
            raise RuntimeError("expected updates of a rank as files, got some in its device's memory")
        messages.send_result(ranks, result, context)
    messages.send_done(ranks)
    context.states.drop_pending()
    context.states.remove_all()
