"""Limits on what peers may open and send: files, connections, calls, requests, and calls beyond a certificate's end.

They are checked before a request is parsed. They know ports, callers and bytes, and nothing of runs or clients.
"""
