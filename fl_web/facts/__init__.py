"""What the coordinator's messages say of runs, rounds and clients, in values and in words: the one read model.

The page, the commands, the live views, the notebook and the trackers take their facts and their words from here, and
only format them. Here is no I/O, and nothing that knows a surface: a time is a Timestamp, which each surface shows in
its own form.
"""
