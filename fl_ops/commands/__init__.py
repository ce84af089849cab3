"""The command lines of `fl`: options, help texts, exit codes and calls into the other packages of fl_ops.

This is the top of fl_ops: no other package imports it. `cli` puts the commands together; they share `options`,
`completion` and `interrupts`, and do not import each other across folders. Modules that need torch are imported inside
the commands, so that the other commands start quickly.

    coordinator    what a coordinator has: runs, clients, models, and views of its training
    access         certificates, tokens of devices, the caller, the audit log
    local          what is computed on this machine: simulations, comparisons, the demo, partitions, methods
"""
