"""The versions of the ledger's schema: one file for each, named by its number and its change.

Alembic runs them in the order of their numbers. A version imports nothing of ours, and a released version never
changes.
"""
