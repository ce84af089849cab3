"""A method, two reducers and a task for Impetus.

Each module is for one of them: `method`, `reducers`, `task`. Nothing here is imported before a run names it.
"""
