"""Engines: they do the local work of a simulated run's clients, with the daemons' own code.

    engine           the interface: orders in, results out
    client_work      one client's work, with the daemon's trainer; the sequential engine, which is the oracle
    workers          several clients at once, in forked processes; worker is the program of such a process
    batched          many clients in lockstep: groups prepares them, pool has their examples, held their updates

An engine knows nothing of rounds, cohorts and admission. It gets assignments and bundles, and returns updates as files,
in lockstep as rows in a device's memory. Every engine for one client at a time gives the same bits.
"""
