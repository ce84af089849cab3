"""Cost of what is checked and recorded about callers.

Each module is a program; the coordinator it measures is a real one in the same process.
"""
