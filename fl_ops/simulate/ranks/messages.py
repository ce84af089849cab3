"""The messages between ranks: orders from rank 0, and results from the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from algorithms.outside_code import described
from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_client.training.results import Evaluation
from fl_ops.errors import Refused
from fl_ops.simulate.engines.engine import Bundles, EngineContext, Evaluated, Failed, Order, Trained
from fl_ops.simulate.ranks.group import Head, Message, Ranks
from fl_ops.simulate.run_files import KEPT, NEXT
from fl_server.aggregation.task_model import packed
from fl_tasks import TaskError
from protos.chunks import Buffer
from protos.codec import Layout, unpack
from protos.fl.v1.tensor_pb2 import Manifest
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment, UpdateHeader

BEGIN, END = "begin", "end"
"""What rank 0 asks for, beside orders."""


def send_bundles(ranks: Ranks, bundles: Bundles) -> None:
    """Send the bundles that clients load from now on, from rank 0 to all others."""
    keys = [list(key) if isinstance(key, tuple) else [key, ""] for key in bundles]
    packs = [memoryview(packed(bundle.tensors, bundle.layout)) for bundle in bundles.values()]
    sizes = [len(data) for data in packs]
    manifests = [bundle.layout.to_manifest().SerializeToString() for bundle in bundles.values()]
    for rank in ranks.others:
        ranks.send(rank, {"do": BEGIN, "keys": keys, "sizes": sizes}, manifests)
    for data in packs:
        ranks.broadcast(data, len(data))


def receive_bundles(ranks: Ranks, message: Message) -> dict[ResourceKey, Bundle]:
    """What `send_bundles` sent, after its message."""
    bundles: dict[ResourceKey, Bundle] = {}
    for (kind, name), size, manifest in zip(message.head["keys"], message.head["sizes"], message.buffers, strict=True):
        layout = Layout.from_manifest(Manifest.FromString(bytes(manifest)), size)
        bundles[(kind, name) if name else kind] = Bundle(layout, unpack(ranks.broadcast(None, size), layout))
    return bundles


def send_order(ranks: Ranks, rank: int, order: Order, context: EngineContext) -> None:
    """Send an order to one rank, with the clients' states."""
    states = [file for client, _ in order.clients for file in context.states.files(client, KEPT)]
    do = "train" if isinstance(order.common, Assignment) else order.on
    ranks.send(rank, {"do": do, "clients": list(order.clients)}, [order.common.SerializeToString(), *states])


def received_order(message: Message, context: EngineContext) -> Order:
    """The order in a message; the clients' states are stored here."""
    do, clients = message.head["do"], [(client, seed) for client, seed in message.head["clients"]]
    common, *states = message.buffers
    for (client, _), state in zip(clients, states, strict=True):
        context.states.put_files(client, KEPT, [state])
    if do == "train":
        return Order(Assignment.FromString(bytes(common)), clients)
    return Order(EvaluationAssignment.FromString(bytes(common)), clients, do)


def send_result(ranks: Ranks, result: Trained | Evaluated | Failed, context: EngineContext) -> None:
    """Send the result of one client to rank 0. The files of an update are removed here."""
    head: Head
    buffers: list[Buffer] = []
    if isinstance(result, Trained):
        if not isinstance(result.update, Path):
            raise TypeError("expected an update in a file: engines of ranks hold none in memory")
        head = {"examples": result.examples, "own_batches": result.own_batches}
        buffers = [
            result.header.SerializeToString(),
            result.update.read_bytes(),
            *context.states.files(result.client, NEXT),
        ]
        context.update_files.remove(result.update)
    elif isinstance(result, Evaluated):
        found = result.found
        head = {
            "found": [found.examples, found.metrics, found.without_personal, found.sums, found.sums_without_personal]
        }
    else:
        head = {"reason": result.reason, "why": result.why, "trace": result.trace}
    ranks.send(0, {"result": type(result).__name__, "client": result.client, **head}, buffers)


def send_done(ranks: Ranks) -> None:
    """Tell rank 0 that all results of the order were sent."""
    ranks.send(0, {"result": "done"})


def send_error(ranks: Ranks, error: BaseException) -> None:
    """Tell rank 0 that the work here raised an error that ends the run."""
    text = str(error) if isinstance(error, TaskError) else described(error)
    ranks.send(0, {"result": "error", "text": text, "in_task": isinstance(error, TaskError)})


def received_result(message: Message, context: EngineContext) -> Trained | Evaluated | Failed:
    """The result of one client, with its files stored here."""
    head = message.head
    match head["result"]:
        case "Trained":
            header, update, *state = message.buffers
            context.states.put_files(head["client"], NEXT, state)
            update_header = UpdateHeader.FromString(bytes(header))
            path = context.update_files.write(update_header.key.exchange, head["client"], [update])
            return Trained(head["client"], update_header, path, head["examples"], head["own_batches"])
        case "Evaluated":
            return Evaluated(head["client"], Evaluation(*head["found"]))
        case _:
            return Failed(head["client"], head["reason"], head["why"], head["trace"])


class Answers:
    """The results of the ranks that have an order. Each rank sends all of its results, then that it is done."""

    def __init__(self, ranks: Ranks, asked: Sequence[int], context: EngineContext) -> None:
        """asked: the ranks with an order."""
        self._ranks, self._left, self._context = ranks, [*asked], context

    def results(self) -> Iterator[Trained | Evaluated | Failed]:
        """The results, rank by rank. Raises the error that ended the work of a rank."""
        while (message := self._next()) is not None:
            yield received_result(message, self._context)

    def discard(self) -> None:
        """Read what is left, so that the next message is an answer to the next order."""
        while self._next() is not None:
            pass

    def _next(self) -> Message | None:
        """The next result, or None if all have come. Raises the error that ended the work of a rank."""
        # One rank after the other: a wait for a message of any rank would not notice that one has ended.
        while self._left:
            message = self._ranks.receive(self._left[0])
            head = message.head
            if head["result"] not in ("done", "error"):
                return message
            rank = self._left.pop(0)
            if head["result"] == "error":
                error = TaskError(head["text"]) if head["in_task"] else None
                raise error or Refused(f"the work of rank {rank} ended with {head['text']}")
        return None
