"""Helpers that server, client and operator share: metrics, tracing, logs, settings, certificates and files.

A helper may enter if at least two programs use it and it knows nothing about federated learning. Message formats belong
to protos, mathematics to algorithms. This package imports no other package of the project.
"""
