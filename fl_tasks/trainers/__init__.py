"""Tasks from training scripts that people have already: a Trainer of Hugging Face, a module of Lightning."""

from fl_tasks.trainers.script import trainer_task

__all__ = ["trainer_task"]
