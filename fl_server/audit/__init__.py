"""The audit log: who called what, from where, on what, with which result.

What is recorded and how rows are linked is decided here. Rows are stored by `store`, and calls are recorded by `rpc`;
nothing here knows a transport.
"""
