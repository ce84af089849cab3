"""One assignment from the coordinator's event to the acknowledged update or the failure report.

`manager` starts and ends the work, `executor` fetches, trains, saves and submits. It uses training, storage, gates and
the connection, and none of these imports it.
"""
