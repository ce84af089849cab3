"""Optimizers of the local steps, and schedules of their learning rate.

A method's corrected gradient d takes the place of the gradient: torch.optim's classes, or Lion here, make the step.
Without any of it a local step is plain SGD, whose code is not here.
"""
