"""Alembic migrations of the ledger, run by `fl_server.store.database.connection.migrate` when a store opens.

To change a table: change `schema.py`, add `versions/NNNN_what.py` whose `down_revision` is the newest one, and run
the store's tests, which compare the migrated database with `schema.py`. Versions never import `schema`: each is a
picture of its day.
"""
