"""A worker, `fl-server --role data`: ends the clients' streams of model bytes for the coordinator.

It decides nothing. Each transfer of a client is a call to the coordinator, which has the session, the limits, the
round and the ledger; the bytes go to the spool and come from a copy of what the coordinator sends out.
"""
