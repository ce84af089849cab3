"""Reducers from outside over the spool, block by block: checked against the run, and applied to accepted updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import algorithms as fl
from fl_server.errors import InvalidInput
from fl_server.round_config import RoundSection
from fl_server.run_config import RunConfig


def outside_names(config: RunConfig) -> str:
    """The run's method and reducer as far as they are from outside, for messages; empty if both are built in."""
    method, reducer = config.algorithm.name, config.round.reducer
    parts = [f"algorithm {method}"] * (method not in fl.names())
    return " and ".join(parts + [f"reducer {reducer}"] * (reducer not in fl.BUILT_IN_REDUCERS))


def outside_reducer(section: RoundSection) -> fl.Reducer | None:
    """The run's reducer if it is from outside, with its parameters. The process must have loaded it.

    Raises AlgorithmError for an unknown reducer, and for a parameter that it does not take.
    """
    if section.reducer in fl.BUILT_IN_REDUCERS:
        return None
    return fl.build_reducer(section.reducer, **section.reducer_parameters)


def check_outside_reducer(section: RoundSection) -> None:
    """Raises InvalidInput unless every round that closes has enough updates for the run's reducer from outside."""
    try:
        reducer = outside_reducer(section)
    except fl.AlgorithmError as error:
        field = ".".join(filter(None, ("round.reducer_parameters", error.parameter)))
        raise InvalidInput(field, "a value that the reducer takes", error) from error
    if reducer is None or reducer.fewest == 1:
        return
    if section.sampling != "fixed":
        raise InvalidInput(
            "round.sampling",
            f'"fixed" with reducer = "{section.reducer}", which needs {reducer.fewest} updates: a cohort may be too'
            " small",
            section.sampling,
        )
    if section.fewest < reducer.fewest:
        raise InvalidInput(
            "round.quorum", f'at least {reducer.fewest} with reducer = "{section.reducer}"', section.fewest
        )


def geometry_of(distances: torch.Tensor) -> fl.Geometry:
    """Of deltas, from the squared distances [clients + 1, clients + 1] between them and, last, the zero vector."""
    return fl.Geometry(distances[-1, :-1].clone(), distances[:-1, :-1].clone())


def as_weights(weights: Sequence[float]) -> torch.Tensor:
    """p_i as a reducer gets them, [clients], float64."""
    return torch.tensor(list(weights), dtype=torch.float64)
