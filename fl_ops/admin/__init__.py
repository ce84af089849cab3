"""The connection to a coordinator: settings, calls, explained failures, and run files as requests.

`client` is the only module of fl_ops that imports grpc. Nothing here prints.
"""
