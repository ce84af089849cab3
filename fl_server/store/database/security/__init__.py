"""Tables and statements of certificates, enrollment tokens and the audit log.

Only what proves who may call, and who called, belongs here. Clients' states and runs do not.
"""
