"""The life of a run: its event loop, the effects of its rounds, restarts, evaluations and its records of progress.

Below the run stand `context.py` (what never changes in a run) and `control.py` (what its parts may ask of it); the
parts take these two, and `run.py` puts them together. `tasks.py`, `eligible.py` and `status/current.py` are below
`control.py`: the parts reach them through it. Decisions about rounds belong to `fl_server.rounds`, arithmetic
to `fl_server.aggregation`; calls of clients and operators enter through `fl_server.uploads`, `fl_server.runs`
and `fl_server.rpc`.
"""
