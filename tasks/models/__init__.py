"""The networks of the built-in tasks and of the papers, in plain torch, a file for each family.

Sizes count weights and biases; docs/tasks.md lists them all. Convolutions are padded nowhere but where it is said, and
first values are torch's unless it is said. Group norms, not batch norms: statistics of a batch mean little when every
client has its own classes.
"""

from tasks.models.cifar import lenet, tutorial_cnn
from tasks.models.emnist import emnist_cnn
from tasks.models.leaf import celeba_cnn, femnist_cnn
from tasks.models.preact import PreActResNet18
from tasks.models.resnet import ResNet18
from tasks.models.small import digits_cnn, grey_cnn, grey_cnn_small

__all__ = [
    "PreActResNet18",
    "ResNet18",
    "celeba_cnn",
    "digits_cnn",
    "emnist_cnn",
    "femnist_cnn",
    "grey_cnn",
    "grey_cnn_small",
    "lenet",
    "tutorial_cnn",
]
