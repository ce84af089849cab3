"""Client states (SCAFFOLD's c_i, FedDyn's h_i): which update each one is from, lost states, and missing members.

Enters here: the coordinator's rules about states that lie on the devices. How a state is computed belongs to
`algorithms`, how it is stored to `fl_client`.
"""
