"""An asynchronous connection to a coordinator's admin port, for programs that hold many calls open at a time."""

from __future__ import annotations

import grpc.aio

from fl_common.proxies import channel_options
from fl_ops.admin.client import credentials
from fl_ops.admin.settings import Connection, Token
from protos.wire import client_options

_RECONNECT_MS = 1000
"""Longest wait before a lost connection is tried again: a person looks at the page meanwhile."""


def open_channel(connection: Connection) -> grpc.aio.Channel:
    """A channel for the calls of one event loop. Raises UsageError."""
    own = {"grpc.max_reconnect_backoff_ms": _RECONNECT_MS, "grpc.initial_reconnect_backoff_ms": 200,
           "grpc.min_reconnect_backoff_ms": _RECONNECT_MS}  # fmt: skip
    options = tuple({**dict(client_options()), **own, **channel_options(connection.proxy)}.items())
    if connection.security is None:
        channel = grpc.aio.insecure_channel(connection.server, options)
    else:
        channel = grpc.aio.secure_channel(connection.server, credentials(connection.security), options)
    channel.get_state(try_to_connect=True)  # before the first call, which then does not wait for it
    return channel


def call_metadata(connection: Connection) -> list[tuple[str, str]]:
    """What goes with a call: the token, if the caller has one. Raises UsageError if it cannot be read."""
    security = connection.security
    return [("authorization", f"Bearer {security.read()}")] if isinstance(security, Token) else []
