"""The files of a run in progress: folders that are removed at its end, and the clients' states in them.

They let several processes work on one run without sending tensors, and keep memory small for many clients.
"""
