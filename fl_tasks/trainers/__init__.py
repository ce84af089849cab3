"""Tasks from training scripts that people have already: a Trainer of Hugging Face, a module of Lightning.

A library enters as a module with a `Script`. Nothing here imports a library before a script that uses it was called.
"""

from fl_tasks.trainers.script import trainer_task

__all__ = ["trainer_task"]
