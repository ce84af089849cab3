"""Fashion-MNIST, EMNIST, CIFAR-10 and CIFAR-100: their images, labels, parts and models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl_tasks import PartitionSpec, Shard, TaskError, partition_task, training_labels
from fl_tasks.batches import batches, ordered_batches
from fl_tasks.built_in.vision import Cifar10, Emnist
from fl_tasks.built_in.vision_files import cifar10_holds_out_batch_5
from fl_tasks.data.labels import class_names
from fl_tasks.models import PreActResNet18, ResNet18
from fl_tasks.torchvision_compat import import_torchvision
from tests.fl_tasks.built_in.cifar import load, write_cifar10, written

SHARD = Shard(torch.arange(0, 1000, 10))


@pytest.mark.parametrize("name", ["fashion-mnist", "emnist", "emnist-digits", "cifar10"])
def test_each_class_has_a_name(name: str) -> None:
    """As many names as the model has scores."""
    task = load(name)
    assert len(class_names(task)) == task.num_classes


def test_fashion_mnist_as_it_is(data_root: str) -> None:
    """60,000 labels, 6,000 of each class, and the official test set in the shape and spread that models expect."""
    task = load("fashion-mnist", {"data_root": data_root})
    test = task.eval_data()
    assert training_labels(task).bincount().tolist() == [6000] * 10
    assert test.targets.bincount().tolist() == [1000] * 10
    assert test.inputs.shape == (10_000, 1, 28, 28)
    inputs = test.prepared()
    assert (test.inputs.dtype, inputs.dtype) == (torch.uint8, torch.float32)
    assert inputs.mean().item() == pytest.approx(0, abs=0.01)
    assert inputs.std().item() == pytest.approx(1, abs=0.01)
    assert task.model()(inputs[:2]).shape == (2, 10)


def test_kept_files_are_read_once(data_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `keep_files`, the second shard, the labels and the held-out part come from memory: the same values."""
    options = {"data_root": data_root, "client_eval_fraction": 0.2}
    fresh, kept = load("fashion-mnist", options), load("fashion-mnist", options)
    kept.keep_files()
    first = kept.train_data(SHARD)
    monkeypatch.setattr(kept, "_read", None)
    kept.keep_files()
    for one, other in ((first, kept.train_data(SHARD)), (fresh.eval_data(SHARD), kept.eval_data(SHARD))):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
    assert torch.equal(fresh.train_labels(), kept.train_labels())


def test_normalised_pixels_have_the_bits_of_a_division_of_bytes(data_root: str) -> None:
    """The pixels are x / 255, less the mean, divided by the deviation: the order of operations fixes the last bit."""
    task = load("fashion-mnist", {"data_root": data_root})
    images, _ = task._read(train=True)
    expected = (images[SHARD.indices] / 255 - 0.2860) / 0.3530
    data = task.train_data(SHARD)
    assert torch.equal(data.prepared(), expected)
    parts = [inputs for inputs, _ in ordered_batches(data, 7)]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(data.inputs, images[SHARD.indices])


def test_cifar10_holds_out_batch_5_without_the_official_test(data_root: str) -> None:
    """40,000 images to train on, batch 5 held out, and `held_out` states that it is not the official test set."""
    if not cifar10_holds_out_batch_5(Path(data_root)):
        pytest.skip("this folder has the official test batch")
    task = load("cifar10", {"data_root": data_root})
    assert isinstance(task, Cifar10)
    assert "NOT the official test set" in task.held_out
    assert len(training_labels(task)) == 40_000
    held_out = task.eval_data().targets.bincount()
    assert (int(held_out.sum()), int(held_out.min()), int(held_out.max())) == (10_000, 952, 1025)


@pytest.mark.slow
def test_cifar10_images_are_normalised_channel_by_channel(data_root: str) -> None:
    """A shard of 100 images: bytes [n, 3, 32, 32] minus mean, over deviation; augmented in training only."""
    task = load("cifar10", {"data_root": data_root, "client_eval_fraction": 0.1})
    assert isinstance(task, Cifar10)
    train, evaluation = task.train_data(SHARD), task.eval_data(SHARD)
    assert (train.inputs.shape, evaluation.inputs.shape) == ((90, 3, 32, 32), (10, 3, 32, 32))
    raw, _ = task._read(train=True)
    expected = (raw[0, 2].double() / 255 - 0.447) / 0.262
    torch.testing.assert_close(evaluation.prepared()[0, 2].double(), expected, atol=1e-6, rtol=1e-6)
    assert evaluation.augment is None
    assert train.augment is not None
    assert train.augment(train.prepared()).shape == train.inputs.shape


@pytest.mark.parametrize(("model", "stem"), [("resnet18-gn", (7, 7)), ("resnet18-gn-cifar", (3, 3))])
def test_cifar10_has_a_choice_of_models(model: str, stem: tuple[int, ...]) -> None:
    """The option model picks the network."""
    built = load("cifar10", {"model": model}).model()
    assert isinstance(built, ResNet18)
    assert stem == built.conv1.kernel_size


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar10", {"model": "vgg"}, 'one of cnn, cnn-small, cnn-24, resnet18-gn, .*, got "vgg"'),
        ("fashion-mnist", {"model": "resnet18-gn"}, 'one of cnn, cnn-small, got "resnet18-gn"'),
        ("cifar10", {"download": "yes"}, "download to be true or false, got 'yes'"),
        ("cifar10", {"client_eval_fraction": 1.5}, "from 0 to below 1, got 1.5"),
        ("cifar10", {"pooled": True}, "pooled leaves no example to evaluate on: set client_eval_fraction"),
        ("cifar10", {"augment": "no"}, "augment to be true or false, got 'no'"),
        ("emnist", {"share": 0}, "share over 0 and up to 1, got 0"),
        ("emnist", {"client_eval_seed": -1}, "client_eval_seed to be a whole number of 0 or more"),
    ],
)
def test_wrong_options_are_refused_at_once(name: str, options: dict[str, object], message: str) -> None:
    """The value given and the values accepted are in the message."""
    with pytest.raises(TaskError, match=message):
        load(name, options)


def test_the_official_test_set_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a test batch in the folder all five batches train, and `held_out` states the official one."""
    folder = write_cifar10(tmp_path, monkeypatch)
    task = load("cifar10", {"data_root": str(tmp_path)})
    assert isinstance(task, Cifar10)
    assert task.held_out == "the official test set, 10,000 images"
    assert training_labels(task).tolist() == [1, 2, 3, 4, 5]
    assert task.eval_data().targets.tolist() == [6]
    (folder / "test_batch").unlink()
    assert training_labels(task).tolist() == [1, 2, 3, 4]
    assert task.eval_data().targets.tolist() == [5]


POOLED: dict[str, object] = {"pooled": True, "client_eval_fraction": 0.2, "client_eval_seed": 3}


def test_pooled_images_are_divided_into_training_and_validation_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test images are behind the training images; a fifth of each shard, drawn by a seed, is for evaluation."""
    write_cifar10(tmp_path, monkeypatch, each=20)
    options = {"data_root": str(tmp_path), **POOLED}
    apart, task = load("cifar10", {"data_root": str(tmp_path)}), load("cifar10", options)
    assert torch.equal(training_labels(task), torch.cat([training_labels(apart), apart.eval_data().targets]))
    assert len(task.eval_data()) == 0
    assert task.held_out.endswith("are pooled, and each client holds out 0.2 of its own images")
    parts = partition_task(PartitionSpec("iid", 4, seed=1), task)
    drawn = []
    for part in parts:
        train, held_out = task.train_data(Shard(part)), task.eval_data(Shard(part))
        assert (len(train), len(held_out), held_out.augment) == (24, 6, None)
        images = {image.numpy().tobytes() for image in [*train.inputs, *held_out.inputs]}
        assert len(images) == 30
        drawn.append([row.numpy().tobytes() for row in held_out.inputs])
    seeded = load("cifar10", options | {"client_eval_seed": 4}).eval_data(Shard(parts[0])).inputs
    assert [row.numpy().tobytes() for row in load("cifar10", options).eval_data(Shard(parts[0])).inputs] == drawn[0]
    assert [row.numpy().tobytes() for row in seeded] != drawn[0]


def test_pooled_needs_the_official_test_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the folder, the batches that are there and both ways out."""
    folder = write_cifar10(tmp_path, monkeypatch)
    (folder / "test_batch").unlink()
    task = load("cifar10", {"data_root": str(tmp_path), **POOLED})
    with pytest.raises(
        TaskError, match=f"needs the official test batch test_batch .* in {folder}, which has data_batch_1, .*_5: put"
    ):
        task.train_labels()
    with pytest.raises(TaskError, match="cifar-100-python, which is missing train, test"):
        load("cifar100", {"data_root": str(tmp_path), **POOLED}).train_labels()


def test_a_share_of_the_images_is_drawn_by_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """floor(share * n) of the pooled images, in their order; the same seed draws the same ones."""
    write_cifar10(tmp_path, monkeypatch, each=21)
    whole = load("cifar10", {"data_root": str(tmp_path), **POOLED})
    options = {"data_root": str(tmp_path), **POOLED, "share": 0.1}
    one, same, other = (load("cifar10", options | {"share_seed": seed}) for seed in (5, 5, 6))
    assert len(training_labels(one)) == 12
    assert torch.equal(one._images(train=True)[0], same._images(train=True)[0])
    assert not torch.equal(one._images(train=True)[0], other._images(train=True)[0])
    every = [row.numpy().tobytes() for row in whole._images(train=True)[0]]
    places = [every.index(row.numpy().tobytes()) for row in one._images(train=True)[0]]
    assert places == sorted(set(places))
    assert torch.equal(training_labels(one), training_labels(whole)[places])


def test_emnist_is_divided_as_in_fedsam(emnist_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the pooled 814,255 images is 81,425; labels are read without images, and each class is divided."""
    sizes = {"train": 697_932, "test": 116_323}
    for part, size in sizes.items():
        labels = emnist_root / "EMNIST/raw" / f"emnist-byclass-{part}-labels-idx1-ubyte"
        labels.write_bytes(bytes([0, 0, 8, 1]) + size.to_bytes(4, "big") + bytes(at % 62 for at in range(size)))
    monkeypatch.setattr(Emnist, "_read", None)
    options = {**POOLED, "data_root": str(emnist_root), "share": 0.1}
    task = load("emnist", options)
    assert len(training_labels(task)) == 81_425
    parts = partition_task(PartitionSpec("dirichlet-class", 100, seed=1, alpha=0.6), task)
    assert sum(map(len, parts)) == 81_425
    assert min(map(len, parts)) >= 10
    assert len({len(part) for part in parts}) > 50


@pytest.mark.parametrize("model", ["cnn", "cnn-24"])
def test_augmentation_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """With augment = false the images are as they are, also for models that crop them; else nothing changes."""
    write_cifar10(tmp_path, monkeypatch, each=3)
    options: dict[str, object] = {"data_root": str(tmp_path), "model": model}
    plain = load("cifar10", options | {"augment": False}).train_data(Shard())
    assert plain.augment is None
    assert [inputs.shape for inputs, _ in batches(plain, 15, 1, epochs=1)] == [(15, 3, 32, 32)]
    usual, stated = load("cifar10", options).train_data(Shard()), load("cifar10", options | {"augment": True})
    assert (usual.augment == stated.train_data(Shard()).augment) is True
    assert usual.augment is not None


@pytest.fixture
def cifar100_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with three training images of one colour, labelled 99, 0 and 50, and a test image labelled 7."""
    official = import_torchvision().datasets.CIFAR100
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, labels in (("train", [99, 0, 50]), ("test", [7])):
        colours = torch.tensor([0, 128, 255]).repeat_interleave(1024).repeat(len(labels), 1).to(torch.uint8)
        content = {"data": colours.numpy(), "fine_labels": labels, "coarse_labels": [0] * len(labels)}
        monkeypatch.setattr(official, f"{name}_list", [written(folder / name, content)])
    return str(tmp_path)


def test_cifar100_reads_the_original_layout(cifar100_root: str) -> None:
    """Fine labels, planes of red, green and blue, normalised by (0 - .5071) / .2675 and so on, a hundred classes."""
    task = load("cifar100", {"data_root": cifar100_root})
    train, test = task.train_data(Shard(torch.tensor([2, 0]))), task.eval_data()
    assert (training_labels(task).tolist(), train.targets.tolist(), test.targets.tolist()) == (
        [99, 0, 50],
        [50, 99],
        [7],
    )
    assert train.inputs.shape == (2, 3, 32, 32)
    expected = torch.tensor([-0.5071 / 0.2675, (128 / 255 - 0.4867) / 0.2565, (1 - 0.4408) / 0.2761])
    torch.testing.assert_close(test.prepared()[0, :, 5, 9], expected)
    assert task.model()(test.prepared()).shape == (1, 100)


@pytest.mark.parametrize(("model", "side"), [("cnn", 32), ("cnn-24", 24), ("resnet18-preact-24", 24)])
def test_models_for_crops_train_on_crops(cifar100_root: str, model: str, side: int) -> None:
    """The augmentation is the model's: 24x24 pieces for those that want them; all evaluate images as they are."""
    task = load("cifar100", {"data_root": cifar100_root, "model": model})
    train, test = task.train_data(Shard()), task.eval_data()
    assert train.augment is not None
    assert train.augment(train.prepared()).shape == (3, 3, side, side)
    net = task.model().eval()
    assert net(train.augment(train.prepared())).shape == (3, 100)
    assert (net(test.prepared()).shape, test.augment) == ((1, 100), None)
    assert isinstance(net, PreActResNet18) == (model == "resnet18-preact-24")


def idx(values: Tensor) -> bytes:
    """The bytes of an IDX file: two zeros, 8 for bytes, the number of axes, their lengths, the values."""
    sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + bytes(values.flatten().tolist())


@pytest.fixture
def emnist_root(tmp_path: Path) -> Path:
    """A folder with both splits: two training images and one test image, white in the second column of row one."""
    folder = tmp_path / "EMNIST" / "raw"
    folder.mkdir(parents=True)
    for split, top in (("byclass", 61), ("digits", 9)):
        for part, labels in (("train", [top, 0]), ("test", [3])):
            images = torch.zeros(len(labels), 28, 28, dtype=torch.uint8)
            images[:, 1, 0] = 255
            (folder / f"emnist-{split}-{part}-images-idx3-ubyte").write_bytes(idx(images))
            (folder / f"emnist-{split}-{part}-labels-idx1-ubyte").write_bytes(idx(torch.tensor(labels)))
    return tmp_path


@pytest.mark.parametrize(("name", "classes"), [("emnist", 62), ("emnist-digits", 10)])
def test_emnist_reads_the_original_layout(emnist_root: Path, name: str, classes: int) -> None:
    """Images are [1, 28, 28] from 0 to 1; the pixel in row 1, column 0 of the file is upright in row 0, column 1."""
    task = load(name, {"data_root": str(emnist_root)})
    train, test = task.train_data(Shard()), task.eval_data()
    assert (train.targets.tolist(), test.targets.tolist()) == ([classes - 1, 0], [3])
    assert test.inputs.shape == (1, 1, 28, 28)
    assert test.prepared().nonzero().tolist() == [[0, 0, 0, 1]]
    assert (test.prepared().max().item(), train.augment) == (1, None)
    assert task.model()(test.prepared()).shape == (1, classes)


def test_emnist_labels_are_read_without_the_images(emnist_root: Path) -> None:
    """Partitioning needs the labels only: unreadable images are refused when they are trained on."""
    (emnist_root / "EMNIST" / "raw" / "emnist-byclass-train-images-idx3-ubyte").write_bytes(b"cut")
    task = load("emnist", {"data_root": str(emnist_root)})
    assert training_labels(task).tolist() == [61, 0]
    with pytest.raises(TaskError, match="files that are not the originals"):
        task.train_data(Shard())
