"""`fl compare`: methods, splits and seeds from one table file, tuned alike, run in process, told with their spread.

table.py reads the file; tuning.py searches each method's setting on held-out training data, plan.py says which cells
come next, workers.py runs them, cells.py keeps a file for each that is done. From those alone summary.py makes the
numbers, and results.py, picture.py and page.py what is left behind.
"""
