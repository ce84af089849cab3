"""Enrollment: tokens, the authority that signs devices' certificates, and revocation.

Which certificate may be issued to which device, and which one is denied, is decided here. Rows are stored by `store`,
and messages are translated by `rpc`; nothing here knows a transport.
"""
