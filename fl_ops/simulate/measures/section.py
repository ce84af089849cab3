"""The table [simulation.measure]: what a simulation measures of its models beyond evaluations."""

from __future__ import annotations

from pydantic import Field

from algorithms.sharpness import MeanLoss, largest_eigenvalue, trace
from fl_common.settings import Section
from fl_common.units import counted

EIGENVALUE, RESIDUAL = "hessian_largest", "hessian_largest_residual"
TRACE, TRACE_ERROR = "hessian_trace", "hessian_trace_error"
RISE = "sharpness"
"""Names of the measures of a model's flatness; see `algorithms.sharpness`."""


class SharpnessSection(Section):
    """How the flatness of a model is measured: on a sample of the clients' training examples."""

    examples: int = Field(default=1000, ge=1)
    """Size of the sample, which is drawn from the training examples of all clients. Fewer examples are all taken."""
    seed: int = Field(default=0, ge=0)
    """The seed of the sample and of the random vectors. It does not depend on the run's seed."""
    iterations: int = Field(default=50, ge=1)
    """Most Hessian-vector products for the largest eigenvalue."""
    tolerance: float = Field(default=1e-3, ge=0)
    """The eigenvalue's residual, as a share of it, at which the iterations end."""
    probes: int = Field(default=20, ge=2)
    """Random vectors for the trace."""
    rho: float = Field(default=0.05, gt=0)
    """Radius of the rise of the loss along its gradient, SAM's measure."""

    def measure(self, loss: MeanLoss) -> dict[str, float]:
        """The measures by name."""
        eigenvalue = largest_eigenvalue(loss, self.iterations, self.tolerance, self.seed)
        of_trace = trace(loss, self.probes, self.seed + 1)
        return {
            EIGENVALUE: eigenvalue.value,
            RESIDUAL: eigenvalue.residual,
            TRACE: of_trace.value,
            TRACE_ERROR: of_trace.standard_error,
            RISE: loss.rise(self.rho),
        }

    def text(self) -> str:
        """What a reader has to know of the numbers."""
        return (
            f"Flatness is that of the mean loss over {counted(self.examples, 'training example')} of all "
            "clients (sample of seed"
            f" {self.seed}), in evaluation mode and without weight decay. Largest eigenvalue: Lanczos to a residual of"
            f" {self.tolerance:g} of it or {self.iterations} products. Trace: Hutchinson with {self.probes} vectors of"
            f" random signs. Rise: that of the loss after a step of length {self.rho:g} up its gradient."
        )


class MeasureSection(Section):
    """What is measured after the last round, and after every so many rounds."""

    every: int = Field(default=0, ge=0)
    """Rounds between two measurements. 0: only after the last round."""
    training: bool = True
    """Measure the task's metrics on the training examples of each client, of all clients."""
    sharpness: SharpnessSection | None = None
    """How flatness is measured. None: it is not."""

    def due(self, round_: int) -> bool:
        """Whether a committed round is measured, which may not be the last one."""
        return bool(self.every) and (round_ + 1) % self.every == 0
