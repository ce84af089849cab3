"""`fl compare`: compares methods over data splits and seeds from one table file, each method tuned in the same way.

`table` reads the file, `tuning` searches settings on validation data, `plan` decides which cells to run next, `workers`
runs them in the order of their `costs` and shows the `progress`, `run_cell` is one run, `cells` keeps a file for each
finished one. From these files alone, `summary` computes the numbers, and `data_files`, `plot` and `report` write the
results. It runs cells through fl_ops.simulate and knows no coordinator.
"""
