"""The life of a run: its event loop, the effects of its rounds, restarts, evaluations and its records of progress.

`control.py` is what the parts share: state, turn, events, tasks and ledger calls. `run.py` adds the parts.
`context.py` is what never changes in a run, `record.py` the only writer of its row in the ledger, `restore.py` what
happens when the coordinator starts again. Decisions about rounds belong to `fl_server.rounds`, arithmetic to
`fl_server.aggregation`; calls of clients and operators enter through `fl_server.uploads`, `fl_server.runs` and
`fl_server.rpc`.
"""
