"""Simulation and replay: a whole run in one process, with the coordinator's and the daemons' code but no network.

    configuration + clients -> Simulation -> one RoundResult per round
    ledger + clients        -> Replay     -> the same models, compared with the digests in the ledger

With `close = "cohort"` on a CPU, the models equal those of a networked run bit for bit. The package may import
fl_server, fl_client and tasks. It decides nothing that the round state machine or the ledger decides, and it prints
only in `console` and `replay`.
"""
