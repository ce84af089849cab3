"""Thousands of clients in a few processes, for the benchmarks of fleets.

A module has one kind of client, and may use the daemons' code. It must not measure: that is for the benchmarks.
"""
