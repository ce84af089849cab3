"""Measurements of local optimizers on small federated tasks.

Each program prints one table. All of a table is computed in one process, on the CPU.
"""
