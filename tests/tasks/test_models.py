"""The networks: their sizes, and their agreement with torchvision."""

from functools import partial

import pytest
import torch
from torch import nn

from tasks.models import ResNet18, digits_cnn, grey_cnn, lenet
from tasks.torchvision_compat import import_torchvision

MODELS = [
    pytest.param(digits_cnn, (1, 8, 8), 21_546, id="digits"),
    pytest.param(grey_cnn, (1, 28, 28), 80_202, id="grey"),
    pytest.param(lenet, (3, 32, 32), 797_962, id="lenet"),
    pytest.param(partial(lenet, 100), (3, 32, 32), 815_332, id="lenet, 100 classes"),
    pytest.param(ResNet18, (3, 32, 32), 11_181_642, id="resnet18"),
    pytest.param(partial(ResNet18, 100), (3, 32, 32), 11_227_812, id="resnet18, 100 classes"),
    pytest.param(partial(ResNet18, cifar_stem=True), (3, 32, 32), 11_173_962, id="resnet18, CIFAR stem"),
]


@pytest.mark.parametrize(("model", "shape", "parameters"), MODELS)
def test_parameters_are_those_of_the_literature(model, shape, parameters):
    """Weights and biases are as many as the paper's net has, and there are no buffers to average."""
    built = model()
    assert parameters == sum(p.numel() for p in built.parameters())
    assert not list(built.buffers())


@pytest.mark.parametrize(("model", "shape", "parameters"), [case for case in MODELS if "100" not in case.id])
def test_scores_for_images(model, shape, parameters):
    """Two images give two rows of ten scores."""
    assert model()(torch.zeros(2, *shape)).shape == (2, 10)


def test_first_values_come_from_the_default_generator():
    """Under equal seeds two models are equal, under another they differ."""
    torch.manual_seed(0)
    first = digits_cnn()[0].weight
    torch.manual_seed(0)
    assert torch.equal(first, digits_cnn()[0].weight)
    assert not torch.equal(first, digits_cnn()[0].weight)


def test_resnet_is_torchvisions_with_group_norm():
    """torchvision's net takes our weights by name, all of them, and then gives the same scores."""
    theirs = import_torchvision().models.resnet18(num_classes=10, norm_layer=lambda c: nn.GroupNorm(2, c))
    ours = ResNet18()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images))


def test_resnet_starts_with_torchvisions_spread():
    """Convolutions start normal with variance 2 / (outputs * kernel area), as torchvision's do: 2 / (512 * 9)."""
    weight = ResNet18().layer4[1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
