"""The gRPC services of the coordinator: Coordinator, Admin and Health, with identity, limits and errors of every call.

It turns messages into calls of the coordinator and results into messages; it decides
nothing about runs or clients.
"""
