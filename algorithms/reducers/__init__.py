"""Reducers: the functions of the built-in ones, and those from outside this package.

`robust` has the built-in ones, `reducer` the interface and all that this process knows.
"""

from algorithms.reducers.reducer import BUILT_IN, Geometry, Reducer, add_reducer, build_reducer, reducer_parameters

__all__ = ["BUILT_IN", "Geometry", "Reducer", "add_reducer", "build_reducer", "reducer_parameters"]
