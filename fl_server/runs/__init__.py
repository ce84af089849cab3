"""All runs of one coordinator, and the operators' and the fleet's calls on them.

Enters here: creating, restoring, finding and changing runs, loading their tasks, and passing on what happens to
clients. How a single run works belongs to `fl_server.run`, messages of the wire to `fl_server.rpc`.
"""
