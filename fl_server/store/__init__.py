"""What the coordinator keeps: the ledger, checkpoints, and the lock on its state directory."""
