"""The learning problems: the `Task` interface, the built-in tasks and models, and the partitioning of data.

Code that defines a task, finds it by name or iterates over its examples may enter. Federated algorithms and anything
that knows a server or a client may not, and the package imports no other package of the project.

    from fl_tasks import Classifier, Examples, Shard        # to write a task
    from fl_tasks import Batched, Samples                   # for data that is not two tensors in memory
    from fl_tasks import fingerprint, load_task             # to load a task by name
    from fl_tasks import PartitionSpec, make_partition      # to partition its data

The loops over examples are in `fl_tasks.batches` and `fl_tasks.evaluation`.
"""

from fl_tasks.base import Classifier, Task
from fl_tasks.data.batched import Batched
from fl_tasks.data.examples import Examples
from fl_tasks.data.samples import Samples
from fl_tasks.data.shard import Shard
from fl_tasks.errors import TaskError
from fl_tasks.loading import fingerprint, load_task, own_options
from fl_tasks.metrics import Metric
from fl_tasks.naming import BUILT_IN, TaskNotListed
from fl_tasks.own_loop import TrainContext, TrainReport
from fl_tasks.partitioning.file import Partition, load_partition, save_partition
from fl_tasks.partitioning.partition import (
    make_partition,
    partition_task,
    training_groups,
    training_labels,
    training_size,
)
from fl_tasks.partitioning.spec import PartitionSpec

__all__ = [
    "BUILT_IN",
    "Batched",
    "Classifier",
    "Examples",
    "Metric",
    "Partition",
    "PartitionSpec",
    "Samples",
    "Shard",
    "Task",
    "TaskError",
    "TaskNotListed",
    "TrainContext",
    "TrainReport",
    "fingerprint",
    "load_partition",
    "load_task",
    "make_partition",
    "own_options",
    "partition_task",
    "save_partition",
    "training_groups",
    "training_labels",
    "training_size",
]
