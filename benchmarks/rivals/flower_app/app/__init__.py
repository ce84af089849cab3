"""The work of the benchmark as a Flower app: FedAvg on the server, and clients that add a constant.

Flower copies this package to the SuperLink and the SuperNodes, which import it from there.
"""
