"""Tasks from outside in processes of their own: what such code does to its process costs one run.

The process that forks them, the process of one task and its messages with the coordinator may enter. The coordinator
reads plain data and tensors of a known layout from it, and never unpickles anything. Built-in tasks run in
the coordinator itself.
"""
