"""Messages of the Admin service as text, tables and JSON for the terminal.

Formatting only: facts and words are those of `fl_web.facts`, and nothing here calls a coordinator or reads a file. It
may import the pure rules of fl_server.rounds.

    output, fitted, text    shared: stdout and stderr, tables that fit the terminal, states and bars
    figures                 the look of pictures, and CSV
    rounds, tables, plot    what is shown of rounds; messages as tables; pictures
    watching, top           views that are drawn again and again: `fl run watch`, `fl top`
"""
