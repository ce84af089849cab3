"""The data of a task: tensors in memory, a data set that is read example by example, or batches that the task makes.

Code that holds, selects, reads or moves examples may enter. Tasks, models and the order of batches may not.
"""
