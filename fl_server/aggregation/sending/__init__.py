"""What clients fetch: the bundles of an exchange, each in its encoding, and differences to those of the round before.

`exchange` chooses the bundles, `outgoing` has the tensors of one, `broadcast` its bytes for the wire. The package must
not import the engine, which gives it a snapshot.
"""
