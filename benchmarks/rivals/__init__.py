"""Rounds of the same work in this system, in Flower and in NVIDIA FLARE, as real processes with TLS on loopback.

The programs of the others are in `flower_app` and `flare_job`, and run in virtual environments of their own.
"""
