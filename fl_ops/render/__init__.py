"""Messages of the Admin service as text, tables and JSON for the terminal.

Rendering only: nothing here calls a coordinator or reads a file. It may import the wire's messages and the pure rules
of fl_server.rounds.

    output, fitted, sparkline, states    shared: stdout and stderr, tables that fit the terminal, bars, words for states
    runs                                 what is shown of one run: rounds, evaluations, health, waits, pictures
    tables, client_details               messages as tables
    live, top                            views that are drawn again and again: `fl run watch`, `fl top`
"""
