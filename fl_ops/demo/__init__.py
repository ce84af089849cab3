"""`fl demo`: trains two algorithms on the same data with a coordinator and daemons on this machine, and compares them.

`processes`, `programs` and `child` start child processes that never outlive the demo; `fleet` uses them for a
coordinator and its daemons. `settings` and `partitioning` decide what is trained; `training` runs one algorithm after
the other; `recovery` kills the coordinator in a round; `faults` and `faulty_client` show a refused and a failing
client; `results`, `conclusions`, `report` and `plot` make the files. It calls the coordinator by fl_ops.admin only.
"""
