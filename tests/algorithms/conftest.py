"""What the algorithm tests share."""

import pytest
import torch

from tests.algorithms.federation import Client, Federation


@pytest.fixture
def federation() -> Federation:
    """Three clients: 2, 4 and 3 rows; 1, 3 and 2 steps."""
    random = torch.Generator().manual_seed(5)

    def client(name: str, rows: int, steps: int) -> Client:
        A, b = torch.randn(rows, 4, generator=random, dtype=torch.float64).split([3, 1], dim=1)
        return Client(name, A, b[:, 0], steps)

    return Federation([client("ada", 2, 1), client("bob", 4, 3), client("cyd", 3, 2)])
