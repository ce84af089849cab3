"""FEMNIST by writer and CelebA by person, from small files in LEAF's format."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_tasks import PartitionSpec, Shard, TaskError, load_task, partition_task, training_size
from fl_tasks.built_in import leaf_files
from fl_tasks.data.labels import class_names
from tests.fl_tasks.built_in.leaf import PERSONS, WRITERS, characters, document, write_celeba, write_femnist, write_file


@pytest.fixture
def femnist(tmp_path: Path) -> str:
    """LEAF's folder with three writers."""
    return write_femnist(tmp_path)


@pytest.fixture
def celeba(tmp_path: Path) -> str:
    """LEAF's folder with three persons."""
    return write_celeba(tmp_path)


def load(name: str, root: str, **options: object) -> Any:
    """The task. Its data are Examples, which the type of a task does not show."""
    return load_task(name, {"data_root": root, **options})


def natural(task: Any) -> list[Shard]:
    """The shard of each user."""
    return [Shard(part) for part in partition_task(PartitionSpec("natural"), task)]


def test_each_writer_is_a_client_with_its_own_training_and_test_examples(femnist: str) -> None:
    """Users, sizes, labels and pixels are those of LEAF's files, in their order, on every client."""
    task = load("femnist", femnist)
    shards = natural(task)
    assert [(len(task.train_data(shard)), len(task.eval_data(shard))) for shard in shards] == list(WRITERS.values())
    for number, shard in enumerate(shards):
        for data, seed in ((task.train_data(shard), 10 * number), (task.eval_data(shard), 10 * number + 1)):
            vectors, labels = characters(len(data), seed)
            assert data.targets.tolist() == labels
            assert data.inputs.dtype == torch.uint8
            assert torch.equal(data.prepared().flatten(1), torch.tensor(vectors))
    assert (len(task.train_data(Shard())), len(task.eval_data())) == (18, 6)


def test_no_bit_of_a_pixel_is_lost(tmp_path: Path) -> None:
    """Each of the 256 values that LEAF writes is the float32 of its file after it was a byte."""
    values = [byte / 255 for byte in range(256)] + [1.0] * 528
    for part in ("train", "test"):
        write_file(tmp_path / part / "all_data_0.json", document({"f": ([values], [0])}))
    prepared = load("femnist", str(tmp_path)).train_data(Shard()).prepared()
    assert torch.equal(prepared.flatten(), torch.tensor(values, dtype=torch.float32))


def test_json_is_parsed_once_and_again_only_after_a_change(femnist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second task reads the cache beside the files; a changed file and a damaged cache are parsed again."""
    first = load("femnist", femnist).train_data(Shard())
    parsed, read = [], leaf_files._read

    def counted(path: Path, classes: int) -> Any:
        parsed.append(path.name)
        return read(path, classes)

    monkeypatch.setattr(leaf_files, "_read", counted)
    again = load("femnist", femnist)
    assert torch.equal(again.train_data(Shard()).inputs, first.inputs)
    assert torch.equal(again.train_data(Shard()).targets, first.targets)
    assert parsed == []
    folder = Path(femnist) / "femnist/data/train"
    changed = min(folder.glob("*.json"))
    os.utime(changed, ns=(0, 0))
    assert len(load("femnist", femnist).train_data(Shard())) == 18
    assert parsed == [changed.name]
    for cached in (folder / "impetus-cache").iterdir():
        cached.write_bytes(cached.read_bytes()[:-100])
    assert torch.equal(load("femnist", femnist).train_data(Shard()).inputs, first.inputs)
    assert len(parsed) == 3


def test_a_folder_that_cannot_be_written_is_read_all_the_same(femnist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a place for the cache, the bytes are in memory."""
    monkeypatch.setattr(leaf_files, "save_cached", lambda *_: False)
    task = load("femnist", femnist)
    assert [len(task.train_data(shard)) for shard in natural(task)] == [6, 3, 9]
    assert not list(Path(femnist).rglob("impetus-cache"))


def test_files_without_a_split_hold_out_a_tenth_of_each_writer(tmp_path: Path) -> None:
    """LEAF's all_data is divided by a fixed seed, as LEAF's own default divides it: n - max(1, floor(0.9 n)) of n."""
    root = write_femnist(tmp_path, {"a": (20, 0), "b": (2, 0), "c": (1, 0)}, split=False)
    task = load("femnist", root)
    shards = natural(task)
    assert [(len(task.train_data(shard)), len(task.eval_data(shard))) for shard in shards] == [(18, 2), (1, 1), (1, 0)]
    whole = [*task.train_data(Shard()).inputs, *task.eval_data().inputs]
    assert len({image.numpy().tobytes() for image in whole}) == 23
    assert torch.equal(load("femnist", root).eval_data().inputs, task.eval_data().inputs)
    assert task.held_out.startswith("a tenth of each user's examples")


def test_users_of_the_test_files_only_are_evaluated_by_the_server(tmp_path: Path) -> None:
    """LEAF's division by user: clients are the training users, without held-out examples of their own."""
    write_file(tmp_path / "train" / "a.json", document({"a": characters(4, 1)}))
    write_file(tmp_path / "test" / "b.json", document({"b": characters(3, 2)}))
    task = load("femnist", str(tmp_path))
    assert (len(task.train_data(Shard())), len(task.eval_data()), len(task.eval_data(Shard()))) == (4, 3, 0)


def test_a_test_example_is_on_one_client_of_any_partition(femnist: str) -> None:
    """Where several clients share a writer, the one with the writer's first training example has its test examples."""
    task = load("femnist", femnist)
    parts = partition_task(PartitionSpec("iid", 4, seed=1), task)
    held_out = [task.eval_data(Shard(part)).inputs for part in parts]
    assert sum(len(images) for images in held_out) == 6
    assert len({image.numpy().tobytes() for images in held_out for image in images}) == 6


def test_a_subset_of_users_is_drawn_by_a_seed(tmp_path: Path) -> None:
    """users = 5 of 12 gives the same five for one seed and others for another, with their test examples only."""
    writers = {f"f{number:04d}_00": (2 + number, 1) for number in range(12)}
    root = write_femnist(tmp_path, writers)
    drawn = []
    for seed in (0, 0, 1):
        task = load("femnist", root, users=5, users_seed=seed)
        drawn.append([len(task.train_data(shard)) for shard in natural(task)])
        assert len(task.eval_data()) == len(drawn[-1]) == 5
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sorted(drawn[0])


def test_a_device_names_its_own_user(femnist: str) -> None:
    """With the option user the training set is this writer's; a run cannot give the option."""
    task = load("femnist", femnist, user="f0001_41")
    assert (training_size(task), len(task.eval_data(Shard())), len(task.eval_data())) == (3, 1, 1)
    assert "user" in task.own_options
    everybody = load("femnist", femnist)
    assert torch.equal(task.train_data(Shard()).inputs, everybody.train_data(natural(everybody)[1]).inputs)


def test_each_person_is_a_client_with_decoded_images(celeba: str) -> None:
    """Images are 84x84 with three channels, resized from the JPEG, and smiling is class 1."""
    task = load("celeba", celeba)
    shards = natural(task)
    assert [(len(task.train_data(shard)), len(task.eval_data(shard))) for shard in shards] == list(PERSONS.values())
    second = task.train_data(shards[1])
    assert second.inputs.shape == (5, 3, 84, 84)
    assert second.targets.tolist() == [1, 0, 1, 0, 1]
    with Image.open(Path(celeba) / "celeba/data/raw/img_align_celeba/000007.jpg") as image:
        expected = np.asarray(image.resize((84, 84), Image.Resampling.BICUBIC))
    assert np.array_equal(second.inputs[0].permute(1, 2, 0).numpy(), expected)
    assert torch.equal(second.prepared(), second.inputs / 255)


def test_a_simulation_decodes_each_face_once(celeba: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kept files the images come from the cache, and a second simulation decodes none; the bits are the same."""
    single = load("celeba", celeba)
    expected = [(single.train_data(shard), single.eval_data(shard)) for shard in natural(single)]
    for decoded in (True, False):
        task = load("celeba", celeba)
        task.keep_files()
        task.train_data(natural(task)[0])
        task.eval_data(natural(task)[0])
        monkeypatch.setattr(Image, "open", None)
        for shard, (train, held_out) in zip(natural(task), expected, strict=True):
            assert torch.equal(task.train_data(shard).inputs, train.inputs)
            assert torch.equal(task.eval_data(shard).inputs, held_out.inputs)
        assert decoded or len(list((Path(celeba) / "celeba/data/raw/impetus-cache").iterdir())) == 2


@pytest.mark.parametrize(
    ("task", "model", "parameters"),
    [
        ("femnist", "cnn", 6_603_710),
        ("femnist", "cnn-2028", 6_539_730),
        ("femnist", "emnist-cnn", 1_206_590),
        ("celeba", "cnn", 30_946),
        ("celeba", "cnn-batch-norm", 31_202),
        ("celeba", "cnn-3", 27_138),
    ],
)
def test_models_have_the_published_numbers_of_parameters(task: str, model: str, parameters: int) -> None:
    """LEAF's networks, and the readings of the Demon paper."""
    made = load(task, "nowhere", model=model)
    assert sum(value.numel() for value in made.model().parameters()) == parameters


@pytest.mark.parametrize(("name", "classes"), [("femnist", 62), ("celeba", 2)])
def test_each_class_has_a_name_and_a_score(request: pytest.FixtureRequest, name: str, classes: int) -> None:
    """As many names as the model has scores, for images as the data has them."""
    task = load(name, request.getfixturevalue(name), **({"model": "cnn-small"} if name == "femnist" else {}))
    assert len(class_names(task)) == classes
    assert task.model()(task.eval_data().prepared()).shape == (6, classes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "vgg"}, 'one of cnn, cnn-2028, cnn-small, emnist-cnn, got "vgg"'),
        ({"users": 4}, "expected 4 or more users in LEAF's files, found 3"),
        ({"users": 2, "user": "f0001_41"}, "the option users or the option user, got users = 2"),
        ({"user": "f9"}, "one of the 3 users of LEAF's files, such as f0000_14, got f9"),
        ({"users": -1}, "users to be a whole number of 0 or more"),
    ],
)
def test_wrong_options_are_refused(femnist: str, options: dict[str, object], message: str) -> None:
    """The message has the value and what is accepted."""
    with pytest.raises(TaskError, match=message):
        load("femnist", femnist, **options).train_labels()


def test_a_wrong_folder_is_named_with_what_it_has(tmp_path: Path) -> None:
    """The message has the folders that were tried, what is there, and where the files come from."""
    for root, found in ((tmp_path / "none", "which does not exist"), (tmp_path, "which has other")):
        (tmp_path / "other").mkdir(exist_ok=True)
        with pytest.raises(
            TaskError, match=f"train and test of femnist in {root}/femnist/data.*{found}.*preprocess.sh"
        ):
            load("femnist", str(root)).train_labels()


def test_half_an_output_is_refused(femnist: str) -> None:
    """Training files without test files, and a folder without JSON, are named."""
    folder = Path(femnist) / "femnist/data"
    shutil.rmtree(folder / "test")
    with pytest.raises(TaskError, match=f"the folder test beside {folder}/train, found none"):
        load("femnist", femnist).train_labels()
    (folder / "test").mkdir()
    with pytest.raises(TaskError, match=f"JSON files in {folder}/test, found none"):
        load("femnist", femnist).train_labels()


GOOD = document({"a": characters(2, 1), "b": characters(1, 2)})
PIXELS, LABELS = GOOD["user_data"]["a"]["x"], GOOD["user_data"]["a"]["y"]


def with_user_a(**changes: Any) -> dict[str, Any]:
    """The good document with another user a."""
    return {**GOOD, "user_data": {**GOOD["user_data"], "a": {"x": PIXELS, "y": LABELS, **changes}}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(json.dumps(GOOD)[:30_000], "user a: the file ends within a value", id="cut"),
        pytest.param(json.dumps(GOOD)[:-1], "expected '}', got the end of the file", id="cut-at-the-end"),
        pytest.param("", "expected '{', got the end of the file", id="empty"),
        pytest.param("[1]", "expected '{', got '\\[1\\]'", id="no-object"),
        pytest.param(json.dumps(GOOD) + "}", "expected the end of the document", id="more"),
        pytest.param('{"users": nothing', "expected a JSON value, got 'nothing'", id="no-json"),
        pytest.param("{" + '"users": ' + "[" * 100_000, "deep nesting", id="deep"),
        pytest.param(json.dumps({"users": ["a"]}), "an object with users, num_samples and user_data", id="other"),
        pytest.param(json.dumps({**GOOD, "users": ["a"]}), "the same users in users and in user_data", id="users"),
        pytest.param(json.dumps({**GOOD, "users": ["a", "b", "b"]}), "each once", id="twice"),
        pytest.param(json.dumps({**GOOD, "num_samples": [2, 7]}), "num_samples has, got 1 of user b", id="numbers"),
        pytest.param(
            json.dumps(GOOD).replace('"b": {', '"a": {'), "expected each user once, got a twice", id="one-key-twice"
        ),
        pytest.param(json.dumps(with_user_a(y=[1])), "user a: expected as many x as y, got 2 and 1", id="lengths"),
        pytest.param(json.dumps(with_user_a(y=[1, 62])), "labels from 0 to 61", id="label"),
        pytest.param(json.dumps(with_user_a(y=[1, 0.5])), "labels from 0 to 61", id="half-a-label"),
        pytest.param(json.dumps(with_user_a(y={"a": 1})), "expected a list of numbers", id="no-labels"),
        pytest.param(json.dumps(with_user_a(x=[[0.5] * 3] * 2)), r"784 numbers as x, got .* \[3\]", id="size"),
        pytest.param(json.dumps(with_user_a(x=[[0.5] * 784] * 2)), "from 0 to 255, divided by 255", id="no-byte"),
        pytest.param(json.dumps(with_user_a(x=[[float("nan")] * 784] * 2)), "divided by 255", id="nan"),
        pytest.param(json.dumps(with_user_a(x=[PIXELS[0], "2.jpg"])), "user a: .* got both", id="names"),
        pytest.param(json.dumps(with_user_a(x=["1.jpg", "2.jpg"])), "got names of image files", id="only-names"),
        pytest.param(
            json.dumps({**GOOD, "user_data": {"a": {"x": []}, "b": {}}}), "user a: expected x and y", id="no-y"
        ),
    ],
)
def test_a_file_that_is_not_leafs_is_named_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    """Cut, mixed and invented files are refused with their path, the reason and what to do."""
    (tmp_path / "all_data").mkdir()
    path = tmp_path / "all_data" / "all_data_0.json"
    path.write_text(text)
    with pytest.raises(TaskError, match=f"LEAF's file {path} cannot be used: .*{message}.*preprocess.sh again"):
        load("femnist", str(tmp_path)).train_labels()


def test_a_user_of_two_files_is_refused(femnist: str) -> None:
    """Files of two runs of preprocess.sh in one folder would count examples twice."""
    folder = Path(femnist) / "femnist/data/train"
    write_file(folder / "all_data_0_niid_05_keep_0_train_9.json", document({"f0002_06": characters(2, 5)}))
    with pytest.raises(TaskError, match=r"found f0002_06 in all_data_0_niid_05\S*json and all_data_1\S*json"):
        load("femnist", femnist).train_labels()


def test_names_and_images_are_not_confused(celeba: str) -> None:
    """CelebA's files do not train FEMNIST, nor the other way round."""
    with pytest.raises(TaskError, match="expected images of 784 numbers as x, got names"):
        load("femnist", f"{celeba}/celeba/data").train_labels()
    write_file(Path(celeba) / "celeba/data/train/b.json", document({"b": (PIXELS, [0, 1])}))
    with pytest.raises(TaskError, match="expected names of image files as x, got images"):
        load("celeba", celeba).train_labels()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("content", "message"), [(None, "is missing"), (b"\xff\xd8cut", "cannot be decoded")])
def test_an_image_that_is_missing_or_broken_is_named(
    celeba: str, kept: bool, content: bytes | None, message: str
) -> None:
    """The message has the image, its folder and the archive."""
    path = Path(celeba) / "celeba/data/raw/img_align_celeba/000008.jpg"
    path.unlink()
    if content:
        path.write_bytes(content)
    task = load("celeba", celeba)
    if kept:
        task.keep_files()
    with pytest.raises(TaskError, match=f"the image 000008.jpg .* in {path.parent}, which {message}.*Unpack"):
        task.train_data(Shard())
    for name in ("../000001.jpg", "/etc/000001.jpg"):
        write_file(Path(celeba) / "celeba/data/train/a.json", document({"x": ([name], [0.0])}))
        with pytest.raises(TaskError, match="names of image files without folders"):
            load("celeba", celeba).train_labels()
