"""Partitioning of a data set among clients: the methods of the papers, their settings, and the partition file.

A method enters as a function in `methods` and a row in `partition.SPLITS`. Nothing here knows a task's data
beyond class numbers and group numbers.
"""
