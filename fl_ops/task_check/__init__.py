"""Tries a task on this machine before a run uses it, and explains what is wrong.

The checks are those of coordinator and device, whose code they call. What a run needs at its time stays in those
programs.
"""
