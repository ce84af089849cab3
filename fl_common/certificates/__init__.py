"""Certificates of holders, as the authorities of this project sign them, and the oldest version of TLS.

`fl ca` on an operator's machine and the coordinator's authority sign the same profile. Keys are never made here.
"""
