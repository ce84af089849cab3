"""Two clients train a small network on generated images: the shape of Flower's template quickstart-pytorch."""
