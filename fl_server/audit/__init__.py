"""The audit log: who called what, from where, on what, with which result.

What is recorded, how rows are limited and linked, and how they are listed is decided here. Rows are stored by `store`,
and the interceptor of `rpc` passes each call to `calls.py`; nothing here knows a transport.
"""
