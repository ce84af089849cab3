"""Backups of a coordinator: ledger, files, keys and privacy accounts together."""
