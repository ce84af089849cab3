"""The connection to the coordinator: sessions, events, retried calls, downloads, and TLS certificates.

Only `transport` imports grpc. The package knows nothing of assignments and training: it gives events to a handler.
"""
