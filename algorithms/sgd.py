"""The plain server optimizer: the model moves by the movement it is fed with, times eta_g."""

from __future__ import annotations

from algorithms import tree
from algorithms.base import RoundInfo, Tensors
from algorithms.compose import Memory, ServerOptimizer


def sgd(eta_g: float) -> ServerOptimizer:
    """x_{t+1} = x_t + eta_g * movement."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        return tree.add(x, movement, eta_g), memory

    return ServerOptimizer(step)
