"""The status of a run: what it is, why the run makes no progress, and what operators and Prometheus see of it.

Enters here: what describes a run or keeps its description. What a run does about it belongs to `fl_server.run`, the
messages that carry it to `fl_server.rpc`.
"""
