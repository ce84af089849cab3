"""The ledger in a SQL database: SQLite in the state directory, or PostgreSQL.

All SQL and all migrations are here. Callers use `Store` and the functions that open it, in `store`.
"""
