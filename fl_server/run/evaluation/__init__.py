"""Evaluation of committed models, on the server and on clients.

Enters here: what asks for an evaluation, collects its results, and applies them to the run. The statistics and the
stop rules themselves are in `fl_server.rounds`.
"""
