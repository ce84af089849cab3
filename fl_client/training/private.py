"""Private training for one assignment: what is applied, whether it is possible here, and the streams of its noise.

Batches and noise come from a secret of the device, under the digest of everything that the result depends on. So the
same work has the same bits after a restart, and work that differs in anything has other noise: the difference of two
updates with the same noise would show the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from blake3 import blake3
from torch import Tensor, nn

from algorithms.base import Algorithm
from algorithms.client import LocalData
from algorithms.parameters import AlgorithmError
from algorithms.privacy.dp_sgd import Privacy, check_method
from algorithms.privacy.per_example import check_model
from algorithms.privacy.random_bits import poisson_draw
from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_client.training.methods import work_of
from fl_client.training.private_data import PrivateData, add, add_tensor, check_data, not_private
from fl_common.privacy.accountant import Mechanism
from fl_common.privacy.secret_stream import SecretStream, derived
from fl_tasks.base import Task
from fl_tasks.batches import count_steps, poisson_batches
from fl_tasks.data.forms import Data, forward_of
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import filled

UNIT = "record"
"""The only unit that a device applies by itself."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The privacy of the steps. It is at least that of the run."""

    noise_multiplier: float
    clip: float
    delta: float

    def message(self) -> training_pb2.LocalPrivacy:
        """The values as the wire has them."""
        return filled(training_pb2.LocalPrivacy, self, unit=UNIT)


def applied_to(training: training_pb2.LocalTraining, least_noise: float = 0.0, most_delta: float = 1.0) -> Applied:
    """What to apply for an assignment with privacy: the stronger of what the run and the site want.

    Raises WorkFailed for another unit and for values that are not valid.
    """
    asked = training.privacy
    if asked.unit != UNIT:
        raise not_private(f'unit: expected "{UNIT}", which is all that this version applies, got {asked.unit[:40]!r}')
    for name in ("noise_multiplier", "clip"):
        if not 0.0 < (value := getattr(asked, name)) < 3e38:
            raise not_private(f"{name}: expected a number over 0, got {value}")
    if not 0.0 < asked.delta < 1.0:
        raise not_private(f"delta: expected a number over 0 and below 1, got {asked.delta}")
    return Applied(max(asked.noise_multiplier, least_noise), asked.clip, min(asked.delta, most_delta))


def check_private(assignment: training_pb2.Assignment, algorithm: Algorithm, data: Data, model: nn.Module) -> None:
    """Raises WorkFailed for an assignment with privacy whose update would reveal more than its noisy steps do."""
    if assignment.personal:
        raise not_private("expected a run without personal parameters, which are trained without noise")
    if assignment.training.max_gradient_norm:
        raise not_private("expected max_gradient_norm = 0: the clip limits the gradient of each example")
    check_data(data)
    try:
        check_method(algorithm)
        check_model(model)
    except AlgorithmError as error:
        raise not_private(str(error)) from error


@dataclass(frozen=True, slots=True)
class PrivateWork:
    """The private steps of one assignment."""

    applied: Applied
    rate: float
    """q."""
    examples: int
    """n."""
    steps: int
    """K."""
    identity: bytes
    """Digest of everything that the result depends on, but for the secret: equal identities have equal results."""
    key: bytes = field(repr=False)
    """The key of the streams of batches and noise."""
    epsilon: float | None = None
    """What the data has spent with this work, at `applied.delta`. None: it is not shared."""

    @property
    def mechanism(self) -> Mechanism:
        """What each step is for the account."""
        return Mechanism(self.applied.noise_multiplier, self.rate)

    def privacy(self) -> Privacy:
        """The mechanism of the local steps."""
        applied = self.applied
        return Privacy(applied.noise_multiplier, applied.clip, self.rate, self.examples, SecretStream(self.key))

    def draws(self) -> Iterator[Tensor]:
        """The positions of each step's examples."""
        random = SecretStream(self.key)
        return (poisson_draw(random, step, self.examples, self.rate) for step in range(self.steps))

    def data_of(self, task: Task, data: Data, seed: int) -> tuple[LocalData, int]:
        """The Poisson batches of the steps, and their number. seed: of the training."""
        batches = poisson_batches(check_data(data), self.draws(), seed)
        local = LocalData(batches, (), task.loss, forward_of(task), steps=self.steps, privacy=self.privacy())
        return local, self.steps

    def header(self) -> training_pb2.AppliedPrivacy:
        """What the update's header says."""
        return training_pb2.AppliedPrivacy(applied=self.applied.message(), epsilon=self.epsilon)


def private_work(  # noqa: PLR0913, PLR0917 - what the result depends on
    assignment: training_pb2.Assignment,
    bundles: Mapping[ResourceKey, Bundle],
    data: PrivateData,
    secret: bytes,
    applied: Applied,
    threads: int = 1,
) -> PrivateWork:
    """The private steps of an assignment.

    secret: of the device's data, 32 bytes. threads: of torch, in the training.
    """
    training, size = assignment.training, data.examples
    work = work_of(training)
    steps = count_steps(size, training.batch_size, epochs=work["epochs"], steps=work["steps"])
    rate = min(1.0, training.batch_size / size)
    identity = _identity(assignment, bundles, data, applied, threads)
    return PrivateWork(applied, rate, size, steps, identity, derived(secret, identity))


def _identity(  # noqa: PLR0913, PLR0917 - as private_work
    assignment: training_pb2.Assignment,
    bundles: Mapping[ResourceKey, Bundle],
    data: PrivateData,
    applied: Applied,
    threads: int,
) -> bytes:
    """The digest of the work: the assignment, the values sent with it, the data, what is applied, and the arithmetic.

    Another build of torch, device or number of threads rounds differently, and no difference of two updates may show
    that.
    """
    hasher = blake3()
    key, fingerprint = assignment.key, assignment.fingerprint
    texts = (
        key.run_id, key.round, key.exchange, assignment.task, fingerprint.version, fingerprint.source,
        assignment.training.SerializeToString(deterministic=True).hex(), applied,
        torch.__version__, data.device, threads,
    )  # fmt: skip
    for text in texts:
        add(hasher, str(text).encode())
    add(hasher, assignment.local_frozen.digest.value)
    for kind in sorted(bundles, key=str):
        if kind != tensor_pb2.RESOURCE_KIND_AVERAGED:
            add(hasher, str(kind).encode())
            for name, tensor in bundles[kind].tensors.items():
                add(hasher, name.encode())
                add_tensor(hasher, tensor)
    add(hasher, data.digest)
    digest: bytes = hasher.digest()
    return digest
