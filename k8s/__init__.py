"""The manifests, and the Python that makes a part of them."""
