"""Curves of runs: which values belong to which chart, and as few points as show their form.

Values only, without templates and without calls. A chart has the same numbers as the table beside it.
"""
