"""The task's model on the training device: one module for all assignments, made when it is first needed.

Assignments replace its values. Those of a run that does not send frozen parameters use the ones that the task gave the
model, so the module remembers their digest, and whether it still has them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from algorithms.model_state import state_views
from fl_client.errors import WorkFailed
from protos.digests import digest_text
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.frozen import frozen_resource, frozen_text


class LocalModel:
    """A module and the frozen parameters that it was made with. For one thread at a time."""

    def __init__(
        self, make: Callable[[], nn.Module], prepare: Callable[[nn.Module], nn.Module] = lambda it: it
    ) -> None:
        """make: a new model of the task; prepare: moves it to the device, and may change how it computes."""
        self._make, self._prepare = make, prepare
        self._module: nn.Module | None = None
        self._own = True
        self._frozen: tensor_pb2.Resource | None = None

    @classmethod
    def of(cls, module: nn.Module) -> LocalModel:
        """A module that exists, with the frozen parameters that it has now."""
        return cls(lambda: module)

    def module(self) -> nn.Module:
        """The module, with the values of its last use."""
        if self._module is None:
            module = self._make()
            # Before the move to the device: on the CPU no tensor is copied for the digest.
            self._frozen, self._own = frozen_resource(state_views(module).frozen), True
            self._module = self._prepare(module)
        return self._module

    @property
    def frozen(self) -> tensor_pb2.Resource | None:
        """The frozen parameters that the task gives its model; None if there are none. Makes the module."""
        self.module()
        return self._frozen

    def release(self) -> None:
        """Forget the module. The next use makes it again."""
        self._module = None

    def replaced(self) -> None:
        """The module got the frozen parameters of a run, in place of its own."""
        self._own = False

    def with_own_frozen(self, wanted: tensor_pb2.Resource) -> nn.Module:
        """The module with the task's frozen parameters. Raises WorkFailed unless these are the wanted ones."""
        if not self._own:
            self.release()  # its memory is free before the new one is made
        module = self.module()
        if self._frozen is None or self._frozen.digest != wanted.digest:
            raise WorkFailed(
                pb.FAILURE_REASON_LAYOUT,
                f"local_frozen: expected the frozen parameters {digest_text(wanted.digest.value)}, got"
                f" {frozen_text(self._frozen) or 'none'} from the task's model() here: put the coordinator's files of"
                " them on this device, and restart the daemon",
            )
        return module
