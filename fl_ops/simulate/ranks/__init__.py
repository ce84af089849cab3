"""A simulation by several processes on one or more machines, connected by torch.distributed.

    group            joins the processes that torchrun started, and carries messages between them
    messages         what rank 0 asks for, and what the others answer
    serving          the work of a rank other than 0

Rank 0 runs the rounds, as a simulation of one process does. All ranks have the data, and rank 0 gives each a share of
every cohort (engines.distributed). Updates come back as files, so the models do not depend on the number of ranks.
"""
