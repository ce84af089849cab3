"""Commands about who may do what, and who did it: authority, certificates, tokens of devices, the audit log.

They hold options and texts. Keys and signatures are in `fl_ops.certificates`, calls in `fl_ops.admin`.
"""
