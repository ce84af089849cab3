"""The assignments of a run: the message for each client, and when it is sent.

Enters here: what goes to the clients of a cohort. What comes back belongs to the other modules of `fl_server.runs`.
"""
