"""What usual errors of torch mean for the author of a task, and what to do."""

from __future__ import annotations

import re

_ADVICE = {
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)": (
        "a linear layer of model() expects {1} numbers for each example and gets {0}: change its first size to"
        " {0}, or what train_data() returns"
    ),
    r"Target (\d+) is out of bounds": (
        "a label is {0}, and the model has no output of that number: the last layer needs one output for each"
        " class, and labels count from 0"
    ),
    r"expected (?:scalar type|target dtype to be) (?:Long|Int)|not implemented for '(?:Float|Double)'": (
        "class numbers are whole numbers: convert the targets with .long()"
    ),
    r"mat1 and mat2 must have the same dtype|Input type .*should be the same|expected .*dtype .*Double": (
        "the inputs are of another number type than the model: convert them with .float()"
    ),
    r"Expected more than 1 value per channel": (
        "batch normalisation needs two examples or more: use GroupNorm, or a batch size without a remainder of one"
    ),
    r"expected input.* to have (\d+) channels, but got (\d+) channels": (
        "the first convolution expects {0} channels and gets {1}: images are [channels, height, width]"
    ),
    r"stack expects (?:each tensor to be equal size|a non-empty)": (
        "examples of unequal size do not fit into one batch, and neither do none: pad them in a collate function"
        " (fl_tasks.Samples), or return tensors of shape [0, ...] for an empty shard"
    ),
    r"index out of range in self": (
        "a token's number is as large as the embedding or larger: enlarge nn.Embedding, or check the tokenizer"
    ),
    r"does not require grad and does not have a grad_fn": (
        "nothing is trained: set requires_grad on a parameter, and compute the loss from the model's output"
    ),
    r"unsupported operand type\(s\) for /: 'NoneType'": (
        "the shard has no folder: give --folder here, and shard = {{ folder = ... }} on the device"
    ),
}
"""Pattern of an error's text -> the advice, with the pattern's groups."""


def advice_on(text: str) -> str:
    """What an error's text means, or an empty text."""
    for pattern, advice in _ADVICE.items():
        if match := re.search(pattern, text):
            return advice.format(*match.groups())
    return ""
