"""Alembic migrations of the ledger, run by `schema_version.migrate` when a store opens.

An empty database gets the tables of `schema.py` and the number of the newest version. An older ledger is changed by
the versions after its own. Before the first release a change of a table is a change of its record or of `schema.py`,
which gives the first version another name. After a release it also needs `versions/ledger_N.py`, whose `down_revision`
is the newest version, and a test that opens a ledger of that version and compares its tables with `schema.py`.
"""
