"""The speed of simulations: clients a second in the CIFAR-10 setting of pfl-research, here and with other libraries.

`python -m benchmarks.simulation` measures. `setting` has model, data and hyperparameters. It needs torch and numpy
alone, because the other libraries run it in virtual environments of their own.
"""
