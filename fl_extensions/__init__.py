"""Code from outside this repository: methods, reducers and tasks of users and of installed packages.

Modules that find such code by its name, load it only where this machine allows it, and identify it by its source may
enter. What a task, a method or a reducer is belongs to `fl_tasks` and `algorithms`.
"""
