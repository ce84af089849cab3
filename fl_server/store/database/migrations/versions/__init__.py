"""The versions of the ledger's schema: one file for each, which changes a ledger of the version before.

A version imports nothing of ours, and a released version never changes.
"""
