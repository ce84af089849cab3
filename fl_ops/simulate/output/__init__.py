"""What a simulation shows and writes: lines and tables on a terminal, files of results, and a plot.

It reads results and decides nothing. `results` has the files, `console` the lines and tables, `progress` the live lines
below them, `plot` the picture of all seeds.
"""
