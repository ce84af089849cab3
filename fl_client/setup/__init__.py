"""Set-up of a device: writes the settings, checks whether a daemon can work, and installs it as a service.

The running daemon never imports this package.
"""
