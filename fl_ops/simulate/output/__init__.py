"""What a simulation shows and writes: lines and tables on a terminal, files of results, and a plot.

It reads results and decides nothing. `results` has the files and the picture of all seeds, `console` the lines
and tables.
"""
