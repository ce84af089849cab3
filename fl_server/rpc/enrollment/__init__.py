"""Calls for certificates: of devices that want one, and of operators who give and deny them.

Messages and limits of calls belong here. Which certificate is issued is decided in `fl_server.enrollment`.
"""
