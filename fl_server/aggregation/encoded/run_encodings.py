"""The encodings of a run's bundles, by its configuration, and the keys of their random numbers."""

from __future__ import annotations

import algorithms as fl
from fl_server.rounds.sampling import training_seed
from fl_server.run_config import RunConfig
from protos.encodings import EncodingSpec, encoding_key
from protos.fl.v1.tensor_pb2 import ResourceKind


def update_encoding(config: RunConfig) -> EncodingSpec:
    """The encoding of a run's updates."""
    section = config.encodings
    return EncodingSpec(section.update, section.fraction or 0.0)


def kind_name(kind: ResourceKind) -> str:
    """One of "model", "direction", "frozen", "optimizer" or "averaged"."""
    return ResourceKind.Name(kind).removeprefix("RESOURCE_KIND_").lower()


def bundle_key(config: RunConfig, kind: ResourceKind, round_: int) -> bytes:
    """The key of an encoded bundle for clients, which is sent with it. round_: under way."""
    return encoding_key(config.seed, "broadcast", round_, kind_name(kind))


class UpdateKeys:
    """The keys of one client's update in an exchange, by payload. Clients derive the same ones from their seed."""

    def __init__(self, seed: int, exchange: int) -> None:
        """seed: the client's training seed of the round."""
        self._seed, self._exchange = seed, exchange
        self._made: dict[str, bytes] = {}

    @classmethod
    def of(cls, config: RunConfig, round_: int, exchange: int, client: str) -> UpdateKeys:
        """The keys of a client in a round of a run."""
        return cls(training_seed(config.seed, round_, client), exchange)

    def of_payload(self, payload: fl.Payload) -> bytes:
        """The key of one payload."""
        if payload not in self._made:
            self._made[payload] = encoding_key(self._seed, "update", self._exchange, payload)
        return self._made[payload]
