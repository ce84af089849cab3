"""Enrollment: tokens, the authority that signs devices' certificates, revocation, and the calls for them.

Which certificate may be issued to which device, and which one is denied, is decided here. Rows are stored by `store`.
Only `calls.py`, the services that devices call, knows grpc.
"""
