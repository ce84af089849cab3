"""A watched run until its end: a live table on a terminal, lines elsewhere.

It gets events and draws. The watch itself, which connects again after a cut, is in `fl_ops.admin.watching`.
"""
