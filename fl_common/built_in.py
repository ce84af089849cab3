"""Names of what is built in, for completion, help and checks of settings, which must not wait for torch.

The code is elsewhere, and most of it needs torch. A test compares each list with the table that has the code.
"""

from __future__ import annotations

from typing import Literal

METHODS = (
    "diloco", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedcm", "feddemon", "feddemonadam", "feddyn", "fednova",
    "fedprox", "fedrobust", "fedsam", "fedyogi", "mfl", "mime", "mimelite", "mofedsam", "proxskip", "qg", "scaffold",
    "slowmo",
)  # fmt: skip
"""`algorithms.registry`."""
REDUCERS = ("mean", "median", "trimmed_mean", "krum")
"""`algorithms.reducers.reducer`."""
TASKS = (
    "digits", "fashion-mnist", "cifar10", "cifar100", "emnist", "emnist-digits", "femnist", "celeba", "shakespeare",
    "least-squares",
)  # fmt: skip
"""`fl_tasks.naming`."""
PartitionMethod = Literal["dirichlet", "dirichlet-hsu", "dirichlet-class", "classes", "shards", "iid", "natural"]
"""`fl_tasks.partitioning`."""
