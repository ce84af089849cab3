"""The networks: their sizes, and their agreement with torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from fl_tasks.models import (
    PreActResNet18,
    ResNet18,
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
from fl_tasks.models.convolutional import CentreCrop
from fl_tasks.torchvision_compat import import_torchvision

COLOUR, CROP, GREY, FACE = (3, 32, 32), (3, 24, 24), (1, 28, 28), (3, 84, 84)

MODELS = [
    pytest.param(digits_cnn, (1, 8, 8), 10, 21_546, id="digits"),
    pytest.param(grey_cnn, GREY, 10, 80_202, id="grey"),
    pytest.param(colour_cnn_small, COLOUR, 10, 22_058, id="colour, small"),
    pytest.param(grey_cnn_small, GREY, 10, 18_378, id="grey, small"),
    pytest.param(lenet, COLOUR, 10, 797_962, id="lenet"),
    pytest.param(partial(lenet, 100), COLOUR, 100, 815_332, id="lenet, 100 classes"),
    pytest.param(tutorial_cnn, CROP, 10, 1_068_298, id="tutorial"),
    pytest.param(ResNet18, COLOUR, 10, 11_181_642, id="resnet18"),
    pytest.param(partial(ResNet18, 100), COLOUR, 100, 11_227_812, id="resnet18, 100 classes"),
    pytest.param(partial(ResNet18, cifar_stem=True), COLOUR, 10, 11_173_962, id="resnet18, CIFAR stem"),
    pytest.param(partial(ResNet18, 100, cifar_stem=True), COLOUR, 100, 11_220_132, id="resnet18, CIFAR stem, 100"),
    pytest.param(PreActResNet18, CROP, 100, 11_227_812, id="pre-activation resnet18"),
    pytest.param(partial(PreActResNet18, stride=2), CROP, 100, 11_227_812, id="pre-activation resnet18, strided"),
    pytest.param(emnist_cnn, GREY, 62, 1_206_590, id="emnist"),
    pytest.param(partial(emnist_cnn, 10), GREY, 10, 1_199_882, id="emnist, digits"),
    pytest.param(femnist_cnn, GREY, 62, 6_603_710, id="femnist"),
    pytest.param(partial(femnist_cnn, units=2028), GREY, 62, 6_539_730, id="femnist, 2028 units"),
    pytest.param(celeba_cnn, FACE, 2, 30_946, id="celeba"),
    pytest.param(partial(celeba_cnn, batch_norm=True), FACE, 2, 31_202, id="celeba, batch norm"),
    pytest.param(partial(celeba_cnn, blocks=3), FACE, 2, 27_138, id="celeba, three blocks"),
]


@pytest.mark.parametrize(("model", "shape", "classes", "parameters"), MODELS)
def test_a_model_has_the_parameters_of_its_paper(
    model: Callable[..., nn.Module], shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    """Weights and biases are as many as the paper's net has; only batch norms have buffers; images give scores."""
    built = model()
    assert parameters == sum(p.numel() for p in built.parameters())
    assert bool(list(built.buffers())) == any(isinstance(module, nn.BatchNorm2d) for module in built.modules())
    assert built(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("model", [tutorial_cnn, PreActResNet18])
def test_networks_for_crops_look_at_the_centre(model: Callable[..., nn.Module]) -> None:
    """An image of 32x32 gives the scores of its rows and columns 4 to 27, for any margin."""
    built, images = model().eval(), torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(built(images), built(images[:, :, 4:28, 4:28]))


def test_an_odd_margin_is_cut_one_more_at_the_far_side() -> None:
    """Five columns cropped to two: one is dropped on the left and two on the right."""
    assert CentreCrop(2)(torch.arange(25).reshape(1, 1, 5, 5)).tolist() == [[[[6, 7], [11, 12]]]]


def test_the_tutorials_response_norm_by_hand() -> None:
    """Of 64 channels of ones the first sees itself and 4 neighbours: 1 / (1 + 0.001/9 * 5) ** 0.75; inner ones 9."""
    norm = tutorial_cnn().get_submodule("4")
    values = norm(torch.ones(1, 64, 1, 1)).flatten()
    expected = torch.tensor([(1 + 0.001 / 9 * count) ** -0.75 for count in (5, 9)])
    torch.testing.assert_close(values[[0, 30]], expected)


def test_a_pre_activation_block_adds_to_its_raw_input() -> None:
    """With its last convolution at zero an unchanged shape is passed on as it is, below zero too."""
    block = PreActResNet18().get_submodule("blocks.1")
    torch.nn.init.zeros_(block.get_parameter("conv2.weight"))
    images = torch.randn(1, 64, 3, 3)
    assert torch.equal(images, block(images))


def test_the_stages_of_the_pre_activation_net_keep_their_size() -> None:
    """As in the program of Reddi et al. 24x24 becomes 12 and then 6; with stride 2 the last stage has 1."""
    sides = []
    for stride in (1, 2):
        net = PreActResNet18(stride=stride)
        net.norm.register_forward_pre_hook(lambda _, inputs: sides.append(inputs[0].shape[-1]))
        net(torch.zeros(1, 3, 24, 24))
    assert sides == [6, 1]


def test_first_values_come_from_the_default_generator() -> None:
    """Under equal seeds two models are equal, under another they differ."""
    torch.manual_seed(0)
    first = digits_cnn().get_parameter("0.weight")
    torch.manual_seed(0)
    assert torch.equal(first, digits_cnn().get_parameter("0.weight"))
    assert not torch.equal(first, digits_cnn().get_parameter("0.weight"))


def test_resnet_is_torchvisions_with_group_norm() -> None:
    """torchvision's net takes our weights by name, all of them, and then gives the same scores."""
    theirs = import_torchvision().models.resnet18(num_classes=10, norm_layer=lambda c: nn.GroupNorm(2, c))
    ours = ResNet18()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images))


def test_resnet_starts_with_torchvisions_spread() -> None:
    """Convolutions start normal with variance 2 / (outputs * kernel area), as torchvision's do: 2 / (512 * 9)."""
    weight = ResNet18().get_parameter("layer4.1.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
