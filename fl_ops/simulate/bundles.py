"""The bundles that simulated clients load: packed where someone needs bytes, else the server's own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import algorithms as fl
from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_ops.simulate.traffic import Name, Names, Sent, TrafficCounter
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.outgoing import Outgoing
from fl_server.aggregation.snapshot import Snapshot
from protos.codec import Buffer, digest_text, pack, unpack
from protos.encodings import PLAIN
from protos.fl.v1.tensor_pb2 import (
    RESOURCE_KIND_AVERAGED,
    RESOURCE_KIND_DIRECTION,
    RESOURCE_KIND_FROZEN,
    RESOURCE_KIND_MODEL,
)


class RoundBundles:
    """The bundles of the exchange under way, and those of evaluations."""

    def __init__(self, engine: Engine, traffic: TrafficCounter, *, packs: bool) -> None:
        """packs: whether someone needs bytes or digests. Else plain tensors stay where they are."""
        self._engine, self._traffic, self._packs = engine, traffic, packs
        self._snapshot: Snapshot | None = None
        self._state_epoch = 0
        self._averaged: Made | None = None
        self.names: Names = {}
        """The bundles of the exchange."""
        self.loaded: Mapping[ResourceKey, Bundle] = {}
        """What its clients load."""
        self.model_digest = ""
        """Digest of the model as it is sent without an encoding; empty if it was not taken."""

    def prepare(self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors], state_epoch: int) -> None:
        """Make the bundles of an exchange. sums: of the round's earlier exchanges."""
        self._snapshot, self._state_epoch, self._averaged, self.model_digest = snapshot, state_epoch, None, ""
        names, loaded, differing = dict[Name, int](), dict[ResourceKey, Bundle](), dict[ResourceKey, Sent]()
        for outgoing in self._engine.outgoing(snapshot, exchange, sums):
            of_exchange = exchange if outgoing.kind == RESOURCE_KIND_DIRECTION else 0
            ready = made(outgoing, self._version(snapshot, of_exchange))
            key = ready.name[0]
            names[ready.name], loaded[key] = ready.size, ready.bundle
            if outgoing.word and ready.sent is not None:
                differing[key] = Sent(ready.name, ready.sent, outgoing.word)
            if outgoing.kind == RESOURCE_KIND_MODEL and outgoing.encoding == PLAIN and ready.digest:
                self.model_digest = digest_text(ready.digest)
        self._traffic.send(differing)
        self.names, self.loaded = names, loaded

    def averaged(self) -> Made | None:
        """The averaged model for clients, made once a round; None if they do not evaluate it."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.averaged is None or not self._engine.config.evaluation.averaged_on_clients:
            return None
        if self._averaged is None and (outgoing := self._engine.averaged_for_clients(snapshot)) is not None:
            self._averaged = made(outgoing, self._version(snapshot))
        return self._averaged

    @property
    def of_evaluation(self) -> Names:
        """What clients load to evaluate the latest model, and the averaged one if the run asks for it."""
        used = (RESOURCE_KIND_MODEL, RESOURCE_KIND_FROZEN)
        averaged = {} if (ready := self.averaged()) is None else {ready.name: ready.size}
        return {**{name: size for name, size in self.names.items() if name[0] in used}, **averaged}

    def loaded_for_evaluation(self) -> Mapping[ResourceKey, Bundle]:
        """The bundles of an evaluation, and others of the exchange."""
        averaged = self.averaged()
        return self.loaded if averaged is None else {**self.loaded, RESOURCE_KIND_AVERAGED: averaged.bundle}

    def _version(self, snapshot: Snapshot, exchange: int = 0) -> bytes:
        """Distinguishes the bundles of one kind where no digest does: those of a round are others than the last one's.

        exchange: of a direction; the others are the same in all exchanges. Empty: the bundles are packed.
        """
        return b"" if self._packs else f"{snapshot.round}.{exchange}.{self._state_epoch}".encode()


class Made(NamedTuple):
    """A bundle for clients."""

    name: Name
    size: int
    """Bytes on the wire."""
    sent: Buffer | None
    """These bytes; None if nobody needs them."""
    digest: bytes
    """Their digest; empty without them."""
    bundle: Bundle
    """What clients load."""


def made(outgoing: Outgoing, version: bytes = b"") -> Made:
    """The bundle of tensors for clients, with their encoding.

    version: distinguishes bundles of one kind. Plain tensors are then taken as they are, for clients on their device:
    nothing is packed, and equal values of two versions count as two bundles. Empty: the digest of the bytes does that.
    """
    key: ResourceKey = (outgoing.kind, outgoing.name) if outgoing.name else outgoing.kind
    size, plain = outgoing.encoded.size_bytes, outgoing.encoding == PLAIN
    if version and plain and not outgoing.word:
        return Made((key, version), size, None, b"", Bundle(outgoing.layout, outgoing.tensors))
    sent = outgoing.bundle()
    digest = outgoing.encoded.digest(sent)
    received = unpack(sent if plain else pack(outgoing.received(sent), outgoing.layout), outgoing.layout)
    return Made((key, digest + outgoing.key), size, sent, digest, Bundle(outgoing.layout, received))
