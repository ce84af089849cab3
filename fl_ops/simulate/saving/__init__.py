"""Saves of a simulated run: after a committed round into a folder, from which a new process continues the same bits.

A save has what passes between rounds, and nothing of a round under way.

point    a run between two rounds, as a value and as JSON values
files    the results of the committed rounds, the client states, and what must be equal to continue
save     the folder of a save: written beside and renamed, so that the end of the process damages nothing
"""
