"""Simulated time: how long the clients' work would take on their devices, and who is there to do it.

    section            the table [simulation.system]
    draws, traces      numbers from hashes of names, and from CSV files
    availability       when a device is there
    devices            the devices of a run's clients
    courses            the times of one assignment
    clock              the run's simulated time, and what happens next
    workload           how much a client has to transfer and to compute
    simulated_time     the clock as the rounds of a run see it

A draw depends only on the run's seed and on names, so a run has the same times on every machine. The package trains
nothing and knows no tensor: it gets numbers of bytes and of examples, and gives times.
"""
