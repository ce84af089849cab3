"""How the task's model is made, so that nobody else holds what server and devices fill with values.

The package has no code of its own.
"""
