"""Saves of a simulated run: after a committed round into a folder, from which a new process continues the same bits.

A save has what passes between rounds, and nothing of a round under way.

point            a run between two rounds, as a value
facts            the point as JSON values, and back
history          the results of the committed rounds, one line each
state_files      the client states, each written once for each change
program          what must be equal for a run to be continued: settings and code
save             the folder of a save: written beside and renamed, so that the end of the process damages nothing
"""
