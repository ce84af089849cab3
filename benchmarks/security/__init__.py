"""Benchmarks of enrollment and of the audit log.

What certificates, tokens and audit rows cost is measured here. Rounds and transfers are not.
"""
