"""`fl landscape`: the loss of saved models along random directions, and how flat their minima are.

`models` reads the models of a task, `surface` computes their values, `files` writes them as CSV and as a picture.
"""
