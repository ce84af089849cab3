"""Commands that show training in other ways than one answer: event files, pictures and the whole terminal.

They hold options and texts. The work is in `fl_ops.trackers` and `fl_ops.render`.
"""
