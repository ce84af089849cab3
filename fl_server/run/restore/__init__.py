"""What happens to a run when the coordinator starts again, or when an ended run continues.

Enters here: what builds the state of a run from the ledger and the disk. The rules of the restored state itself belong
to `fl_server.rounds` and to the other modules of `fl_server.run`.
"""
