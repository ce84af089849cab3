"""What a method's code makes for all clients of a group: local rules, computed payloads and next states.

That code is written for one client. For clients that differ in the tensors of their states and payloads alone it is
mapped over these; clients that differ in a number, such as omega_i or K_i, are mapped by its values. Code that torch
cannot map, and states that differ in their tensors, are taken client by client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from algorithms import tree
from algorithms.base import Algorithm, ClientContext, InputAscent, LocalRule, Memory, Payload, Tensors
from algorithms.batched import stacked
from algorithms.batched.batches import NotBatched
from algorithms.optimizers.steps import LocalOptimizer
from algorithms.outside_code import is_interrupt
from algorithms.precision import widened


@dataclass
class Contexts:
    """The contexts of a group's clients."""

    common: ClientContext
    """The context without a state and omega."""
    omegas: Sequence[float]
    states: Memory = field(default_factory=dict)
    """[clients, ...]; empty if no client has a state, or if they are separate."""
    separate: Sequence[Memory] | None = None
    """States that differ in their tensors."""
    alone: str = ""
    """Why the method's code ran client by client; empty if it did not."""

    @classmethod
    def of_clients(cls, contexts: Sequence[ClientContext]) -> Contexts:
        """The contexts of clients that were sent the same."""
        states, omegas = [context.state for context in contexts], [context.omega for context in contexts]
        common = replace(contexts[0], state={}, omega=1.0)
        if len({_form(state) for state in states}) > 1:
            return cls(common, omegas, separate=states, alone="their states differ in their tensors")
        return cls(common, omegas, {symbol: stacked.stack([it[symbol] for it in states]) for symbol in states[0]})

    def of(self, position: int) -> ClientContext:
        """One client's context."""
        state: Memory = (
            {symbol: stacked.of_client(tensors, position) for symbol, tensors in self.states.items()}
            if self.separate is None
            else self.separate[position]
        )
        return replace(self.common, state=state, omega=self.omegas[position])

    def map(
        self,
        function: Callable[[ClientContext, Mapping[Payload, Tensors], int], Any],
        payloads: Mapping[Payload, Tensors],
        numbers: Sequence[object] = (),
    ) -> list[tuple[Sequence[int], Any]]:
        """The function's result for each client, as (positions, the results of these clients as one).

        function: (context, payloads, a position) -> named tensors; of the position it reads only `numbers`. payloads:
        [clients, ...]. The tensors of a result are [positions, ...].
        """
        places: dict[object, list[int]] = {}
        for position, omega in enumerate(self.omegas):
            places.setdefault((omega, numbers[position] if numbers else None), []).append(position)
        results: list[tuple[Sequence[int], Any]] = []
        for positions in places.values():
            if self.separate is None and not self.alone:
                try:
                    results.append((positions, self._mapped(function, payloads, positions)))
                    continue
                except BaseException as error:  # the method's code may do what vmap cannot, for which torch has no type
                    if is_interrupt(error):
                        raise
                    self.alone = f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}"
            for position in positions:
                mine = {payload: stacked.of_client(tensors, position) for payload, tensors in payloads.items()}
                found = function(self.of(position), mine, position)
                results.append(([position], _nested(lambda tensor: tensor.unsqueeze(0), found)))
        return results

    def _mapped(self, function: Callable[..., Any], payloads: Mapping[Payload, Tensors], positions: list[int]) -> Any:
        context = replace(self.common, omega=self.omegas[positions[0]])
        if not self.states and not payloads:
            found = function(context, {}, positions[0])
            return _nested(lambda tensor: tensor.expand(len(positions), *tensor.shape), found)
        trees: Any = (dict(self.states), dict(payloads))
        if len(positions) < len(self.omegas):
            trees = tuple(_nested(lambda tensor: tree.rows_of(tensor, positions), one) for one in trees)
        with _PerTensor():
            return vmap(lambda state, mine: function(replace(context, state=state), mine, positions[0]))(*trees)


class _PerTensor(TorchFunctionMode):
    """Makes functions of lists of tensors, which vmap does not know, one operation for each tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not name.startswith("_foreach_"):
            return func(*args, **(kwargs or {}))
        one = getattr(Tensor, name.removeprefix("_foreach_"))
        lists = [values if isinstance(values, list | tuple) else [values] * len(args[0]) for values in args]
        return [one(*operands, **(kwargs or {})) for operands in zip(*lists, strict=True)]


def in_order(parts: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """The parts' named tensors as one of all clients, in the order of their positions."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.tensor([position for positions, _ in parts for position in positions]).argsort()
    return _joined([part for _, part in parts], order)


@dataclass(frozen=True, slots=True)
class Rules:
    """The local rules of a group. They have the same terms."""

    terms: LocalRule
    """What they have in common: gradient and anchor. Its tensors and factors are not read."""
    a: Tensor | None
    """[clients]; None if it is 1 for all."""
    mu: Tensor | None
    """So too, and gamma; None if it is 0 for all."""
    gamma: Tensor | None
    u: Tensors | None
    """[clients, ...], wide; so is v."""
    v: Tensors | None
    ascents: Sequence[InputAscent]
    """One for each client; empty if they have none."""
    optimizers: Sequence[LocalOptimizer]
    """So too."""


def rules_of(algorithm: Algorithm, contexts: Contexts, x: Tensors) -> Rules:
    """The rules. x: the wide parameters, for their layout. Raises NotBatched if the terms differ."""
    rules: dict[int, LocalRule] = {}

    def tensors_of(context: ClientContext, _: Mapping[Payload, Tensors], position: int) -> dict[str, Tensors]:
        rule = algorithm.client_rule(context)
        mapped = contexts.separate is None and contexts.states and not contexts.alone
        factors: tuple[object, ...] = (rule.a, rule.mu, rule.gamma)
        if mapped and (rule.ascent or rule.optimizer or any(isinstance(factor, Tensor) for factor in factors)):
            raise NotImplementedError("the rule has parts of each client that are no tensors of the model")
        rules[position] = replace(rule, u=None, v=None)
        return {name: widened(it) for name, it in (("u", rule.u), ("v", rule.v)) if it is not None}

    parts = contexts.map(tensors_of, {})
    terms = {
        (rule.gradient, rule.anchored, rule.ascent is None, rule.optimizer is None, *found)
        for rule, (_, found) in zip((rules[positions[0]] for positions, _ in parts), parts, strict=True)
    }
    if len(terms) > 1:
        raise NotBatched("the clients' local rules have different terms")
    found = in_order(parts)
    for name, tensors in found.items():
        tree.check_layout(x, stacked.of_client(tensors, 0), f"direction {name} of the local rule")
        found[name] = {key: tensors[key].to(tensor.device) for key, tensor in x.items()}
    firsts = {position: rules[positions[0]] for positions, _ in parts for position in positions}
    all_rules, like = [firsts[position] for position in range(len(firsts))], next(iter(x.values()))
    a, mu, gamma = (
        stacked.factor_of([getattr(rule, name) for rule in all_rules], like, neutral)
        for name, neutral in (("a", 1.0), ("mu", 0.0), ("gamma", 0.0))
    )
    ascents = [rule.ascent for rule in all_rules if rule.ascent is not None]
    optimizers = [rule.optimizer for rule in all_rules if rule.optimizer is not None]
    return Rules(all_rules[0], a, mu, gamma, found.get("u"), found.get("v"), ascents, optimizers)


def _form(state: Memory) -> object:
    return tuple(
        (symbol, tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()))
        for symbol, tensors in state.items()
    )


def _nested(function: Callable[[Tensor], Tensor], found: Any) -> Any:
    if isinstance(found, Tensor):
        return function(found)
    return {name: _nested(function, part) for name, part in found.items()}


def _joined(parts: Sequence[Any], order: Tensor) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([*parts])[order.to(first.device, non_blocking=True)]
    return {name: _joined([part[name] for part in parts], order) for name in first}
