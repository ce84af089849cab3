"""What a run remembers of its committed rounds: statistics of a round, and the totals of rounds that are settled.

Enters here: values that are computed from commits and kept in place of them. The commits themselves are in the ledger.
"""
