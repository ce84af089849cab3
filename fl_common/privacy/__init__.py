"""Differential privacy outside the mathematics of training: what is spent, and the secret streams of noise.

Both need no torch. Files, and what a run or a site demands, do not belong here.
"""
