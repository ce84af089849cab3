"""A run's settings.

`config` is the whole, `sections` are those on local training and rounds, `spec` converts it from and to the wire, and
`plain_values` has the bounds of options.
"""
