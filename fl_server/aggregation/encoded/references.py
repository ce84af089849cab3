"""The part of every delta that the server knows, for runs whose clients leave it out (`encodings.reference`)."""

from __future__ import annotations

import algorithms as fl
from algorithms.reference import KnownPart, Reference, has_reference, reference_of
from fl_server.aggregation.methods import learning_rate_in, optimizer_spec, rate_schedule
from fl_server.errors import InvalidInput
from fl_server.run_config import RunConfig

KEY = "encodings.reference"


class References:
    """The references of the exchanges of one round: of the latest one whose bundles were made."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._round = -1
        self._known: dict[int, Reference | None] = {}
        """By exchange."""

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


def check_reference(config: RunConfig, algorithm: fl.Algorithm, *, own_loop: bool) -> None:
    """Raises InvalidInput if a run has a reference that its clients could not leave out."""
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
