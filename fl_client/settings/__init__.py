"""The daemon's settings: the TOML file, the device's identity, the training device, and the syntax of time windows.

Settings are read and checked here. The package imports only the errors of the daemon.
"""
