"""Measures the web page with many runs and clients in a real ledger.

The rows are written through the store's own methods; a real coordinator and `fl web` answer. Nothing here is part of a
test.
"""
