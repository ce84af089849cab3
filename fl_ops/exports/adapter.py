"""An adapter in the format of the peft library: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fl_ops.errors import UsageError
from fl_tasks import Task, TaskError
from fl_tasks.errors import task_code

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_PREFIX = "base_model.model."
"""What peft puts before the name of each tensor."""
_NAME = "default"
"""The adapter's name in a peft model. Files do not have it."""


def adapter_of(task: Task, module: nn.Module) -> tuple[dict[str, Tensor], str]:
    """The tensors of the model's adapter by peft's names, and its configuration as JSON.

    A model of peft has both. For another one the task gives the configuration by `adapter_config()`, and the adapter is
    its trainable parameters, with those whose name has "lora_" in it. Raises UsageError if there is no adapter.
    """
    wrapped = _peft_model(module)
    config = _config_of(task, wrapped)
    tensors = _peft_tensors(wrapped) if wrapped is not None else _own_tensors(module)
    if not tensors:
        raise UsageError("expected a model with an adapter, got one without trainable parameters")
    return tensors, json.dumps(config, indent=2, sort_keys=True, default=_plain) + "\n"


def _peft_model(module: nn.Module) -> nn.Module | None:
    """The first part of the module that peft has given adapters."""
    return next((part for part in module.modules() if isinstance(getattr(part, "peft_config", None), dict)), None)


def _config_of(task: Task, wrapped: nn.Module | None) -> dict[str, Any]:
    given = getattr(task, "adapter_config", None)
    if callable(given):
        try:
            with task_code("the task's adapter_config()"):
                config = given()
        except TaskError as error:
            raise UsageError(str(error)) from error
    elif wrapped is not None:
        configs: Any = wrapped.peft_config
        config = configs.get(_NAME)
    else:
        raise UsageError(
            "expected a model of the peft library, or a task with adapter_config(), the content of adapter_config.json"
            f" as a dict; {type(task).__name__} has neither"
        )
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    if not isinstance(config, Mapping):
        raise UsageError(f"adapter_config(): expected a dict or a configuration of peft, got {type(config).__name__}")
    return {**config, "inference_mode": True}


def _peft_tensors(wrapped: nn.Module) -> dict[str, Tensor]:
    """As `save_pretrained` of peft writes them. The task has imported peft."""
    from peft.utils import get_peft_model_state_dict

    found = get_peft_model_state_dict(wrapped, adapter_name=_NAME, save_embedding_layers=False)
    return {name if name.startswith(_PREFIX) else _PREFIX + name: tensor for name, tensor in found.items()}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): each.detach()
        for name, each in module.named_parameters()
        if each.requires_grad or "lora_" in name
    }


def _plain(value: object) -> object:
    """JSON for what configurations hold: sets, enums and others."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(getattr(value, "value", value))
