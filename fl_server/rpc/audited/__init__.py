"""The audit log as calls see it: which calls are recorded and with what, and the list of its rows.

How rows are linked, limited and stored is decided in `fl_server.audit`.
"""
