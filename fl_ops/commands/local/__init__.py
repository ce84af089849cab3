"""The command `fl methods`: the methods and reducers of this machine. It may load code, and asks no coordinator.

The command and its table may enter.
"""
