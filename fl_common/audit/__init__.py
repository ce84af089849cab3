"""Rows of an audit log, and the hash chain that links them: shared by coordinator, daemon and the programs that verify.

Where rows come from and where they are stored is decided elsewhere; nothing here knows a ledger or a call.
"""
