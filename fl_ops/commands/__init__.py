"""The command lines of `fl`: options, help texts, exit codes and calls into the other packages of fl_ops.

This is the top of fl_ops: no other package imports it. Modules that need torch are imported inside the commands, so
that the other commands start quickly.
"""
