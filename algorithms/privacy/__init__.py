"""Differential privacy of local training: DP-SGD, which hides each example in the noise of every step.

The caller brings the secret stream that batches and noise are drawn from. Accounts, secrets and files do not belong
here.
"""
