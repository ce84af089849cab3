"""The networks of the built-in tasks and of the papers, in plain torch.

Parameter counts include biases; docs/training/tasks.md lists all networks. Unless stated otherwise, convolutions have
no padding and initial values are torch's defaults. The networks use group norms instead of batch norms, because batch
statistics mean little when each client has its own classes. Data and losses do not belong here.
"""

from fl_tasks.models.convolutional import (
    celeba_cnn,
    colour_cnn_small,
    digits_cnn,
    emnist_cnn,
    femnist_cnn,
    grey_cnn,
    grey_cnn_small,
    lenet,
    tutorial_cnn,
)
from fl_tasks.models.preact import PreActResNet18
from fl_tasks.models.resnet import ResNet18
from fl_tasks.models.transformer import CausalTransformer

__all__ = [
    "CausalTransformer",
    "PreActResNet18",
    "ResNet18",
    "celeba_cnn",
    "colour_cnn_small",
    "digits_cnn",
    "emnist_cnn",
    "femnist_cnn",
    "grey_cnn",
    "grey_cnn_small",
    "lenet",
    "tutorial_cnn",
]
