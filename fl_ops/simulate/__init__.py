"""A whole run in one process: the coordinator's and the daemons' own code, without the network between them.

    config + clients -> Simulation -> one RoundResult a round
    ledger + clients -> replay     -> the same models again, checked against the ledger's digests

The results are those of a networked run with `close = "cohort"`, bit for bit on the CPU.
"""
