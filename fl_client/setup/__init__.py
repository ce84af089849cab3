"""Putting a daemon on a device: writes its settings, looks whether it can work there, and makes it a service.

Nothing of a daemon that runs imports this room.
"""
