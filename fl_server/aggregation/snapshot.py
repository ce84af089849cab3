"""A model of a run with the server's state: everything that passes from round to round."""

from __future__ import annotations

from dataclasses import dataclass, field

import algorithms as fl


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

    @property
    def parameters(self) -> fl.Tensors:
        """The trainable parameters in the model's dtypes: what clients are sent, what is evaluated and exported."""
        return {**self.state.x, **self.rounded}
