"""Backups of a coordinator: ledger, files, keys and privacy accounts together.

Each is made and restored by one command, which starts no coordinator.
"""
