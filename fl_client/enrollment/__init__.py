"""This device's certificate from the coordinator: got with a token, renewed while it is valid, replaced on the disk.

Certificates that the owner brings and renews by other means (`tls.renew` is false) do not need this package.
"""
