"""Tasks from outside in processes of their own: what such code does to its process costs one run.

Enters here: the process that forks them, the process of one task, and the messages between it and the coordinator. The
coordinator reads plain data and tensors of a known layout from it, and never unpickles anything. Built-in tasks run in
the coordinator itself.
"""
