"""Rounds over links with little bandwidth or a long way: `python -m benchmarks.links`.

A proxy in a process of its own shapes every connection of the daemons. It may use the standard library only.
"""
