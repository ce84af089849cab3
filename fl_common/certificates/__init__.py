"""Certificates and keys of all programs: reading PEM files, the holder's name and role, the lowest TLS version.

What coordinator, daemon and `fl` share about certificates belongs here. Issuing them does not: the coordinator does
that in `fl_server/enrollment`, and `fl ca` in `fl_ops/certificates`.
"""
