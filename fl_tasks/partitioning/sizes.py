"""The number of examples of each client, for methods that do not determine it themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fl_tasks.partitioning.spec import PartitionSpec

Indices = npt.NDArray[np.int64]


def client_sizes(spec: PartitionSpec, total: int, rng: np.random.Generator) -> Indices:
    """Sizes [N]: floor(total / N) each; with sigma, unequal ones with this total, at least 1 each."""
    return lognormal_sizes(spec, total, rng) if spec.sigma else np.full(spec.clients, total // spec.clients)


def lognormal_sizes(spec: PartitionSpec, total: int, rng: np.random.Generator) -> Indices:
    """Sizes [N] in the ratios of lognormal(ln(total / N), sigma) draws, with this total (Acar et al., FedDyn).

    The largest remainders are rounded up, and every client has at least 1 example.
    """
    exponents = spec.sigma * rng.standard_normal(spec.clients)
    # Only ratios matter after rescaling. Relative to the largest exponent nothing overflows.
    ratios = np.exp(exponents - exponents.max())
    exact = ratios / ratios.sum() * total
    sizes: Indices = np.maximum(np.floor(exact), 1).astype(np.int64)
    missing = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[: max(missing, 0)]] += 1
    for _ in range(-missing):
        sizes[sizes.argmax()] -= 1
    return sizes
