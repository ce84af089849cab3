"""Two clients train a small network on generated images: the shape of Flower's template quickstart-pytorch.

It stands for that template where the hub is not reached from which `flwr new` fetches it.
"""
