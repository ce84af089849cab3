"""Benchmarks of data that is read while a model trains. Each compares a daemon with a plain PyTorch loop."""
