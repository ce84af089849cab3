"""Commands about the runs, clients and models of a coordinator, and views of its training.

They hold options and texts. The calls are in `fl_ops.admin`; what is shown and written is in `fl_ops.render`,
`fl_ops.exports`, `fl_ops.trackers` and `fl_web`.
"""
