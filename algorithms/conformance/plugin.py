"""A plugin for pytest: the federations that the laws need, and reports of failed laws with the compared values.

A package has its method tested with two files. conftest.py:

    pytest_plugins = ["algorithms.conformance.plugin"]

test_laws.py:

    from algorithms.conformance.cases import MethodCase
    from algorithms.conformance.suite import MethodLaws

    class TestSignMomentum(MethodLaws):
        cases = [MethodCase("default", sign_momentum)]
        neutral = [MethodCase("alpha-1", sign_momentum, {"alpha": 1})]
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("algorithms.conformance.suite", "algorithms.conformance.reducer_suite")

import torch  # noqa: E402 - the line above comes before every import of the suites
from torch import Tensor  # noqa: E402

import algorithms as fl  # noqa: E402
from algorithms.conformance.cases import MethodCase  # noqa: E402
from algorithms.conformance.federation import UNEVEN, Client, Federation, RunState  # noqa: E402


@pytest.fixture
def federation() -> Federation:
    """Three clients: 2, 4 and 3 rows; 1, 3 and 2 steps."""
    random = torch.Generator().manual_seed(5)

    def client(name: str, rows: int, steps: int) -> Client:
        A, b = torch.randn(rows, 4, generator=random, dtype=torch.float64).split([3, 1], dim=1)
        return Client(name, A, b[:, 0], steps)

    return Federation([client("ada", 2, 1), client("bob", 4, 3), client("cyd", 3, 2)])


class PlayedRuns:
    """The rounds UNEVEN of cases, played once for all laws that compare with them. Laws only read the states."""

    def __init__(self) -> None:
        self._runs: dict[str, list[RunState]] = {}

    def of(self, federation: Federation, case: MethodCase) -> list[RunState]:
        """The states after each round, from the model of this federation with its settings."""
        key = repr((case.name, sorted(case.parameters.items()), federation.x["head"].dtype, federation.settings))
        if key not in self._runs:
            self._runs[key] = federation.run(case.build(), UNEVEN)
        return self._runs[key]


@pytest.fixture(scope="session")
def played() -> PlayedRuns:
    """Runs of the federation `federation`, whose model may be of another dtype."""
    return PlayedRuns()


@pytest.fixture(scope="session")
def conditioned() -> Federation:
    """Three clients like those of `federation`, with condition numbers of 1.5 to 2.4: methods converge in few rounds.

    The Hessians differ in eigenvalues and eigenvectors, so uncorrected local steps still drift.
    """
    random = torch.Generator().manual_seed(5)

    def orthogonal(rows: int) -> Tensor:
        q: Tensor = torch.linalg.qr(torch.randn(rows, 3, generator=random, dtype=torch.float64))[0]
        return q

    def client(name: str, rows: int, steps: int, eigenvalues: tuple[float, float, float]) -> Client:
        roots = torch.tensor(eigenvalues, dtype=torch.float64).sqrt()
        A = rows**0.5 * orthogonal(rows) @ torch.diag(roots) @ orthogonal(3).T
        return Client(name, A, torch.randn(rows, generator=random, dtype=torch.float64), steps)

    clients = [
        client("ada", 3, 1, (0.6, 1.0, 1.4)),
        client("bob", 5, 3, (1.2, 0.8, 1.0)),
        client("cyd", 4, 2, (1.0, 1.4, 0.6)),
    ]
    return Federation(clients, settings=fl.LocalSettings(learning_rate=0.2))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA"))])  # fmt: skip
def device(request: pytest.FixtureRequest) -> str:
    """Each device that is here."""
    return str(request.param)
