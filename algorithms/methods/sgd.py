"""The plain server optimizer: the model moves by the movement times eta_g."""

from __future__ import annotations

from algorithms import tree
from algorithms.base import Memory, RoundInfo, Tensors
from algorithms.compose import ServerOptimizer
from algorithms.parameters import PositivePerRound


def sgd(eta_g: PositivePerRound = 1.0) -> ServerOptimizer:
    """x_{t+1} = x_t + eta_g * movement."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        return tree.add(x, movement, eta_g), memory

    return ServerOptimizer(step)
