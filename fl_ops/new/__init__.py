"""Makes a package with a task of one's own: the templates, and how they become files.

The templates are text and no modules of ours: what they import is not imported here. Code that tries a task is in
`fl_ops.task_check`.
"""
