"""The method and the reducers satisfy the laws that Impetus' own ones satisfy."""

from __future__ import annotations

from collections.abc import Mapping

from algorithms.conformance.cases import Law, MethodCase, ReducerCase
from algorithms.conformance.reducer_suite import ReducerLaws
from algorithms.conformance.suite import MethodLaws
from sign_momentum.method import sign_momentum
from sign_momentum.reducers import most_similar, weighted_median

_SIGNS: Mapping[Law, str] = {
    "optimum": "a sign keeps the size of the mean, also of entries whose momentum is nearly zero"
}


class TestSignMomentum(MethodLaws):
    """The method, alone and with options that every method has."""

    cases = (
        MethodCase("default", sign_momentum, exempt=_SIGNS),
        MethodCase("every-entry", sign_momentum, {"agreement": 0, "weights": "examples"}, _SIGNS),
        MethodCase("adam-sam", sign_momentum, {"server_optimizer": "adam", "gradient": "sam"}, _SIGNS),
        MethodCase("fedavg", sign_momentum, {"alpha": 1}),
    )
    neutral = (MethodCase("alpha-1", sign_momentum, {"alpha": 1}),)


class TestReducers(ReducerLaws):
    """Both reducers."""

    cases = (
        ReducerCase("median", weighted_median),
        ReducerCase("blend", weighted_median, {"blend": 0.3}),
        ReducerCase("similar", most_similar, exempt={"translation": "angles change when a vector is added"}),
        ReducerCase("one", most_similar, {"keep": 0.01}, {"translation": "angles change when a vector is added"}),
    )
