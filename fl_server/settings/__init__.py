"""The coordinator's settings.

`config` is the whole of server.toml; `limits` and `security` have its sections on limits, certificates and tokens.
"""
