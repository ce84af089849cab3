"""A model of a run with the server's state: everything that passes from round to round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import algorithms as fl
from fl_server.store.averaged_model import AveragedModel


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed model, or the first one."""

    round: int
    """The round that made it; -1 for the first model."""
    state: fl.ServerState
    buffers: fl.Tensors
    rounded: fl.Tensors = field(default_factory=dict)
    """The parameters of a lower precision than the state's, in the model's dtypes."""

    norm: float = 0.0
    """L2 norm of the trainable parameters."""
    averaged: AveragedModel | None = None
    """The mean of the committed models, if the run has one after this round."""

    @property
    def parameters(self) -> fl.Tensors:
        """The trainable parameters in the model's dtypes: what clients are sent, what is evaluated and exported."""
        return {**self.state.x, **self.rounded}

    def averaged_in(self, folder: Path) -> Snapshot:
        """The snapshot whose averaged model, if there is one, has its sums in this folder."""
        if self.averaged is None:
            return self
        return replace(self, averaged=replace(self.averaged, folder=folder, before=None))
