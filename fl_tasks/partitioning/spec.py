"""The settings of a partition, as in a device's `[shard] partition`, in `fl partition` and in a partition file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, get_args

from fl_tasks.errors import TaskError

Method = Literal["dirichlet", "dirichlet-hsu", "dirichlet-class", "classes", "shards", "iid", "natural"]

OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dirichlet": ("alpha", "prior_scaled", "sigma"),
        "dirichlet-hsu": ("alpha", "prior_scaled", "rotate", "sigma"),
        "dirichlet-class": ("alpha", "min_examples"),
        "classes": ("classes", "sigma"),
        "shards": ("sigma",),
        "iid": ("stratified", "sigma"),
        "natural": (),
    }
)
"""The fields of PartitionSpec that each method reads."""


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """The partition of a data set of M examples. Equal specs give the same partition of the same labels.

    Methods: "dirichlet", equal sizes and class proportions from Dir(alpha), clients filled in random order (FedCM);
    "dirichlet-hsu", the same, one client after another (Hsu et al.); "dirichlet-class", each class divided among
    clients by Dir(alpha), with random sizes (FedEM); "classes", a few random classes each; "shards", sorted by label
    and cut (McMahan et al.); "iid", shuffled; "natural", by the task's groups: writer, person or speaker.

    An option that the method does not read must have its default. Only alpha is ignored instead.
    """

    method: Method
    clients: int = 0
    """N, 1 or more. 0, for "natural" only: one client for each group."""
    seed: int = 0
    alpha: float = 0.3
    """Concentration, greater than 0: 0.1 is very uneven, 100 nearly even."""
    prior_scaled: bool = False
    """Concentrations are alpha times the share of each class in the data, which sum to alpha (the scale of Hsu et al.,
    where 6 on ten classes is 0.6 here), instead of alpha for each class."""
    rotate: bool = False
    """For "dirichlet-hsu": clients take one example each in turn."""
    classes: int = 2
    """For "classes": the number of classes that each client draws, 1 or more."""
    min_examples: int = 10
    """For "dirichlet-class": the fewest examples per client; draws are repeated until all have them."""
    stratified: bool = False
    """For "iid": every client has the same number of each class, or one more if N does not divide the class."""
    sigma: float = 0.0
    """Spread of unequal sizes, lognormal(ln(M / N), sigma) rescaled to M (FedDyn's unbalanced split); 0 is equal."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise TaskError(f'expected the partition method {", ".join(get_args(Method))}, got "{self.method}"')
        if self.clients < (0 if self.method == "natural" else 1):
            raise TaskError(
                f'expected 1 or more clients, got {self.clients}: only the method "natural" takes 0, for one client for'
                " each group"
            )
        if self.seed < 0:
            raise TaskError(f"expected a partition seed of 0 or more, got {self.seed}")
        if not 0 < self.alpha < float("inf"):
            raise TaskError(f"expected alpha over 0, got {self.alpha}")
        if not 0 <= self.sigma < float("inf"):
            raise TaskError(f"expected sigma of 0 or more, got {self.sigma}")
        if self.classes < 1 or self.min_examples < 0:
            raise TaskError(
                f"expected 1 or more classes and min_examples of 0 or more, got {self.classes} and {self.min_examples}"
            )
        self._check_options()

    @property
    def reads_classes(self) -> bool:
        """Whether the method needs the class number of each example."""
        return self.method not in ("iid", "natural") or self.stratified

    def _check_options(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        unread = set().union(*OPTIONS.values()) - {"alpha", *OPTIONS[self.method]}
        changed = sorted(name for name in unread if getattr(self, name) != defaults[name])
        if changed:
            takes = ", ".join(OPTIONS[self.method]) or "no options"
            raise TaskError(
                f'the partition method "{self.method}" does not read {", ".join(changed)}: it takes {takes}'
            )
        if self.stratified and self.sigma:
            raise TaskError(f"expected stratified or unequal sizes, got stratified with sigma = {self.sigma}")
