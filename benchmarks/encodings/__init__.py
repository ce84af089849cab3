"""Encodings of bundles: their bytes, speed and error.

`python -m benchmarks.encodings` measures all of them on the layout of a ResNet-18. docs/training/encodings.md has the
results. The package measures `protos.encodings` only: the speed of a run with encodings is not its subject.
"""
