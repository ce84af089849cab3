"""`fl-client doctor`: one module for each check of the device and of the way to its coordinator.

Checks change nothing: no session is opened, no directory is made, no lock is taken. A running daemon is not disturbed.
"""
