"""One module for each method or family of methods: both halves, with the equations of its paper in the docstring.

A method may import the core modules of `algorithms` and, where it builds on another method, that method. Only
`algorithms.registry` imports the methods.
"""
