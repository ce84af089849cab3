"""Everything the coordinator keeps on disk: ledger, checkpoints, spool, and the lock on its state directory.

All code that knows file formats, fsync, SQL or disk errors is here. It must not import the packages that use it, such
as runs, uploads or admission.
"""
