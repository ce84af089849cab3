"""Who leads: the state of a coordinator opened, its lease kept, and the standby that waits for it.

With a ledger in PostgreSQL one coordinator holds the lease. With an object store too, another one may wait.
"""
