"""What is learned: the `Task` contract, the built-in tasks, their models, and how data is dealt to clients.

    from tasks import Classifier, Examples, Shard        # to write a task
    from tasks import fingerprint, load_task             # to use one, by name
    from tasks import PartitionSpec, make_partition      # to deal its data

Beside these: `tasks.batches` and `tasks.evaluation`, the loops over examples.
"""

from tasks.base import Examples, Shard, Task, TaskError
from tasks.classifier import Classifier
from tasks.loading import fingerprint, load_task
from tasks.naming import BUILT_IN, TaskNotListed
from tasks.partition import PartitionSpec, make_partition, training_groups, training_labels
from tasks.partition_file import Partition, load_partition, save_partition

__all__ = [
    "BUILT_IN",
    "Classifier",
    "Examples",
    "Partition",
    "PartitionSpec",
    "Shard",
    "Task",
    "TaskError",
    "TaskNotListed",
    "fingerprint",
    "load_partition",
    "load_task",
    "make_partition",
    "save_partition",
    "training_groups",
    "training_labels",
]
