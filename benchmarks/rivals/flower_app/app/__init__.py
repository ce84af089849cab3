"""The work of the benchmark as a Flower app."""
