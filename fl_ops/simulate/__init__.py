"""Simulation and replay: a whole run in one process, with the coordinator's and the daemons' code but no network.

    configuration + clients -> Simulation -> one RoundResult per round
    ledger + clients        -> Replay     -> the same models, compared with the digests in the ledger

With `close = "cohort"` on a CPU, the models equal those of a networked run bit for bit. The package may import
fl_server, fl_client and fl_tasks. It decides nothing that the round state machine or the ledger decides, and it prints
only in `output.console` and `replay`.

    simulation, federation   the rounds, and what passes between them; collection and updates: a round's updates
    engines, ranks           the local work: one client after the other, in processes, in lockstep, on several machines
    system                   simulated time: the speeds, links and availability of clients
    seeds, saving            several runs, and runs that are stopped and continued
    settings, clients, code  the file of a run, its clients and their data, the code of a method from outside
    output, files            what is shown and written, and the files of a run in progress
"""
