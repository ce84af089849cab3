"""Engines: they do the local work of a simulated run's clients, with the daemons' own code.

    engine           the interface, and what is the same for all engines
    client_work      one client's work, with the daemon's trainer
    sequential       one client after the other, in this process: the oracle
    workers          several clients at once, in forked processes; worker is the program of such a process
    choice           makes the engine that the user chose

An engine knows nothing of rounds, cohorts and admission. It gets assignments and bundles, and returns updates as files.
Every engine for the CPU gives the same bits.
"""
