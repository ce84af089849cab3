"""`fl demo`: a coordinator and daemons on this machine, two algorithms on the same data, and a page that compares them.

command.py     the command: options in, files and a table out
settings.py    what is trained, and with which settings        grid.py    where the settings come from
processes.py   child processes that never outlive the demo     child.py   their side of that
fleet.py       one coordinator and its daemons, started and waited for
training.py    one run after the other, watched
results.py     rounds and what they come to                    facts.py   everything as JSON
picture.py  page.py  comparison.py    the results to look at
"""
