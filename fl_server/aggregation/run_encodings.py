"""The encodings of a run's bundles, by its configuration, and the keys of their random numbers."""

from __future__ import annotations

import algorithms as fl
from algorithms.reference import KnownPart, Reference, has_reference, reference_of
from fl_server.aggregation.methods import check_own_loop, learning_rate_in, optimizer_spec, rate_schedule
from fl_server.errors import InvalidInput
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


KEY = "encodings.reference"


class References:
    """The references of the exchanges of one round: of the latest one whose bundles were made."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._round = -1
        self._known: dict[int, Reference | None] = {}
        """The known part of the deltas, by exchange."""

    def prepare(self, algorithm: fl.Algorithm, round_: int, exchange: int, direction: fl.Tensors | None) -> None:
        """Compute the reference of an exchange.

        algorithm: with its parameters of the round. direction: as the clients receive it.
        """
        if round_ != self._round:
            self._round, self._known = round_, {}
        self._known[exchange] = reference_of(algorithm, exchange, direction)

    def of_client(self, round_: int, exchange: int, steps: int) -> KnownPart | None:
        """What to add to the sent values of a client with so many steps. None: they are the delta."""
        if self._config.encodings.reference == "none":
            return None
        if round_ != self._round or exchange not in self._known:
            raise RuntimeError(
                f"expected the bundles of round {round_}, exchange {exchange}, to be made before updates"
            )
        reference = self._known[exchange]
        if reference is None:
            return None
        schedule = rate_schedule(self._config.local.schedule)
        settings = fl.LocalSettings(learning_rate_in(self._config, round_), schedule=schedule)
        return KnownPart(reference, reference.scale(settings, steps))


def check_local_steps(config: RunConfig, algorithm: fl.Algorithm, *, own_loop: bool) -> None:
    """Raises InvalidInput unless the local steps suit the method, and a reference that clients are to leave out.

    own_loop: the task has a training loop of its own.
    """
    if own_loop:
        check_own_loop(config, algorithm)
    section = config.encodings
    if section.reference == "none":
        return
    why = ""
    if section.update == "plain":
        why = 'with update = "plain", which has no error that a reference could reduce'
    elif own_loop or not optimizer_spec(config.local).plain:
        why = "unless clients make plain SGD steps, which are linear in the direction"
    elif not has_reference(algorithm):
        why = f"with {algorithm.name}, whose clients add no direction of the server to their steps"
    elif algorithm.objective != "uniform":
        why = 'with objective = "examples": the reference would differ among clients'
    if why:
        raise InvalidInput(KEY, f'"none" {why}', section.reference)
