"""Messages of the Admin service as text, tables and JSON for the terminal.

Rendering only: nothing here calls a coordinator or reads a file. It may import the wire's messages and the pure rules
of fl_server.rounds.
"""
