"""Who may do what: the roles of each method, and the owners of runs.

Only the rpc package and its services ask here. Certificates and tokens are read elsewhere.
"""
