"""Logs, status line and Prometheus metrics of the daemon.

The package may import the daemon's settings and errors. It knows nothing of assignments, training or storage.
"""
