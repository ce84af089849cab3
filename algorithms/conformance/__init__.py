"""The laws that every method and every reducer satisfies, as tests that another package can inherit.

A federation of small least-squares problems, the laws, and a plugin for pytest may enter. Nothing else in the project
imports this package, and only `federation` works without pytest.
"""
