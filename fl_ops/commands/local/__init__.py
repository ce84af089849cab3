"""Commands that compute on this machine and ask no coordinator of the operator's. They may load code of the user.

They hold options and texts. The work is in `fl_ops.simulate`, `fl_ops.compare` and `fl_ops.demo`.
"""
