"""The files of updates, from the first chunk until their round is committed.

Only bytes, offsets and checksums are known here; the meaning of an update is decided in admission.
"""
