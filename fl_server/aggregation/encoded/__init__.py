"""Updates and bundles that travel in an encoding: which one a run has, their keys, and reading of encoded updates.

An encoded update is decoded block by block wherever its values are needed, so it is never whole in memory, and reducers
need not know of encodings.
"""
