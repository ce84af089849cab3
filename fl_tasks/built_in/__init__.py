"""The tasks that come with the project, and what only they need: transforms, reading of data files, torchvision.

A task enters with its module and its name in `fl_tasks.naming`. Networks belong to `fl_tasks.models`.
"""
