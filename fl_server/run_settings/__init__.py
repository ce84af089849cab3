"""A run's settings.

`config` is the whole, `sections` are those on local training and rounds with the limits of values, and `spec` converts
it from and to the wire.
"""
