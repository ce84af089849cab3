"""Secure aggregation: a coordinator learns the sum of its clients' updates, and no single one of them.

The protocol is SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova 2020, "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead") on keys that the clients' certificates sign. Both sides are state machines without I/O:
bytes go in, bytes come out. Files, networks and tensors do not belong here.
"""
