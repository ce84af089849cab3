"""The coordinator's part of its web page: who may read it, the socket, and the process that serves it.

The pages are made by `fl_web` in a process of its own, never on the coordinator's event loop. That process holds no
identity: the coordinator keeps the browsers' sessions, and decides for each of their calls.
"""
