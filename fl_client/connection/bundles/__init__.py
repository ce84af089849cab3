"""Downloads: the bundles of an assignment, each fetched once by its digest, resumed after a cut, and held.

`cache` decides what is fetched, `download` transfers bytes, `expected` checks what the coordinator describes, and
`differences` makes a bundle from one that is held. The package knows nothing of training.
"""
