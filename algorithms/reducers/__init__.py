"""Reducers from outside this package: what they are, and those that this process knows.

The interface of a reducer and the table of reducers may enter. The built-in reducers are in `algorithms.robust`.
"""

from algorithms.reducers.reducer import Geometry, Reducer
from algorithms.reducers.table import BUILT_IN, add_reducer, build_reducer, reducer_parameters

__all__ = ["BUILT_IN", "Geometry", "Reducer", "add_reducer", "build_reducer", "reducer_parameters"]
