"""Operators' identities from bearer tokens of an OpenID Connect provider.

Nothing here knows grpc, runs or certificates. A token is never part of a log line, a repr or an error.
"""
