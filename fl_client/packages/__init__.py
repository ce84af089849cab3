"""Task packages: code that comes from the coordinator, and runs only if this site's policy and its owner let it.

`held` decides and keeps what was approved and installed, `sandbox` limits the process, `process` is what runs in it,
and `trainer` is the daemon's end of it.
"""
