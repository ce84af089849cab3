"""The task shakespeare: its text by speaker, its transformer, and its low-rank adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_tasks import PartitionSpec, Shard, TaskError, load_task, make_partition, training_groups
from fl_tasks.batches import batches, seed_everything
from fl_tasks.built_in.shakespeare import VOCABULARY, Shakespeare, encode, read_speakers
from tests.fl_tasks.built_in.plays import LINES, write_play


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A data folder with the small play."""
    return write_play(tmp_path)


def task_with(root: str, **options: object) -> Shakespeare:
    """The task on the small play."""
    task = load_task("shakespeare", {"data_root": root, "least_characters": 500, **options})
    assert isinstance(task, Shakespeare)
    return task


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def decode(tokens: Tensor) -> str:
    """The characters of tokens."""
    return "".join(VOCABULARY[token] for token in tokens.tolist())


def test_a_target_is_the_next_character_of_the_same_speaker(root: str) -> None:
    """Each example is a part of one speaker's text, and its target the part one character further."""
    task = task_with(root)
    data, speakers = task.train_data(Shard()), task.train_groups()
    texts = list(read_speakers(Path(root)).values())
    for inputs, targets, speaker in zip(data.inputs, data.targets, speakers.tolist(), strict=True):
        assert decode(inputs) + decode(targets[-1:]) in texts[speaker]
        assert inputs[1:].equal(targets[:-1])


def test_held_out_text_is_not_trained_on(root: str) -> None:
    """Training ends where the last tenth of a speaker's text begins, by characters."""
    task = task_with(root)
    text = "\n\n".join([LINES["ROMEO"]] * 30)
    first = task.train_data(Shard())[task.train_groups() == 0]
    begin = len(text) - len(text) // 10
    assert decode(first.inputs.flatten()) == text[: len(first) * 64]
    assert len(first) * 64 < begin
    assert decode(task.eval_data().inputs[0]) == text[begin : begin + 64]


def test_a_speaker_is_a_client_of_the_natural_partition(root: str) -> None:
    """Three speakers have enough text; the fourth one's is the public text."""
    task = task_with(root)
    groups = training_groups(task)
    assert groups is not None
    parts = make_partition(PartitionSpec("natural", 3), None, groups, size=len(groups))
    assert [groups[part].unique().tolist() for part in parts] == [[0], [1], [2]]
    assert decode(task.public_text().inputs[0]).startswith("Anon!\n\nAnon!")


def test_a_shard_has_a_held_out_part_of_its_own(root: str) -> None:
    """client_eval_fraction takes its share of the shard's examples, and no example is in both parts."""
    task = task_with(root, client_eval_fraction=0.2)
    shard = Shard(torch.arange(20))
    assert (len(task.train_data(shard)), len(task.eval_data(shard))) == (16, 4)


def test_a_position_does_not_see_later_characters(root: str) -> None:
    """A change of the last character changes no score before it."""
    model = task_with(root).model().eval()
    tokens = torch.randint(65, (1, 64))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 65
    assert model(tokens).shape == (1, 65, 64)
    assert torch.equal(model(tokens)[..., :-1], model(changed)[..., :-1])
    assert not torch.equal(model(tokens)[..., -1], model(changed)[..., -1])


@pytest.mark.slow
def test_the_transformer_learns_the_text(root: str) -> None:
    """The first loss is that of guessing, ln 65 = 4.17; forty steps on the play take a fifth of it away."""
    task = task_with(root)
    seed_everything(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in batches(task.train_data(Shard()), 16, seed=0, steps=40):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.17, abs=0.15)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_adapters_leave_the_outputs_of_the_base_unchanged(root: str, tmp_path: Path) -> None:
    """With the base's weights from a file, B = 0 gives the base's scores, bit for bit, and only B is trained."""
    seed_everything(1)
    base = task_with(root).model()
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    adapted = task_with(root, lora=4, base=str(tmp_path / "base.safetensors")).model()
    tokens = torch.randint(65, (2, 64))
    assert torch.equal(adapted.eval()(tokens), base.eval()(tokens))
    assert len(trained(adapted)) == 3 * 4
    assert all(".lora_B." in name and not value.any() for name, value in trained(adapted).items())


@pytest.mark.slow
def test_a_frozen_a_does_not_depend_on_the_seed(root: str) -> None:
    """Devices that make the model under any seed have the same A, and A is not 0."""
    found = []
    for seed in (1, 2):
        seed_everything(seed)
        model = task_with(root, lora=4).model()
        found.append({name: value for name, value in model.named_parameters() if ".lora_A." in name})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) and value.any() for name, value in found[0].items())


@pytest.mark.slow
def test_train_a_trains_both_matrices(root: str) -> None:
    """Twice as many matrices are trainable as without the option."""
    names = trained(task_with(root, lora=4, train_a=True).model())
    assert {name.split(".")[-3] for name in names} == {"lora_A", "lora_B"}
    assert len(names) == 2 * 3 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": -1}, "lora to be a whole number of 0 or more, got -1"),
        ({"lora": 1.5}, "lora to be a whole number of 0 or more, got 1.5"),
        ({"train_a": True}, "train_a is for adapters: set the option lora"),
        ({"lora": 2, "train_a": 1}, "train_a to be true or false, got 1"),
        ({"least_characters": 0}, "least_characters to be a whole number of 1 or more, got 0"),
        ({"client_eval_fraction": 1.0}, "from 0 to below 1, got 1.0"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, object], message: str) -> None:
    """The value given and the values accepted are in the message."""
    with pytest.raises(TaskError, match=message):
        load_task("shakespeare", options)


def test_an_option_may_arrive_as_a_float(root: str) -> None:
    """Options of a run travel as numbers without a kind: 4.0 is a rank."""
    assert task_with(root, lora=4.0).rank == 4


def test_missing_text_is_named_with_folder_and_remedy(tmp_path: Path) -> None:
    """Without data the message has the file and both ways to it."""
    task = load_task("shakespeare", {"data_root": str(tmp_path)})
    with pytest.raises(TaskError, match=f"{tmp_path}/tinyshakespeare/input.txt.*char-rnn.*data_root"):
        task.train_data(Shard())


def test_text_without_speeches_is_refused(tmp_path: Path) -> None:
    """A novel has no lines with a speaker's name."""
    write_play(tmp_path)
    (tmp_path / "tinyshakespeare" / "input.txt").write_text("Call me Ishmael.\n\nSome years ago")
    with pytest.raises(TaskError, match="each with a first line such as ROMEO:, got none"):
        load_task("shakespeare", {"data_root": str(tmp_path)}).eval_data()


def test_no_speaker_with_enough_text_is_refused(root: str) -> None:
    """The message has the option to change."""
    with pytest.raises(TaskError, match="no speaker has 100000 characters: lower the option least_characters"):
        task_with(root, least_characters=100_000).train_groups()


def test_characters_outside_the_vocabulary_are_named() -> None:
    """A text with other characters is not read as something else."""
    assert encode("\nz").tolist() == [0, 64]
    with pytest.raises(TaskError, match="got also 'Äé'"):
        encode("Äh, café")


def test_tiny_shakespeare_as_it_is(data_root: str) -> None:
    """The real text: 99 speakers with 12,933 examples, 1,389 held out, and 1,745 examples of public text."""
    if not (Path(data_root) / "tinyshakespeare").exists():
        pytest.skip(f"no tinyshakespeare in {data_root}")
    task = load_task("shakespeare", {"data_root": data_root})
    assert isinstance(task, Shakespeare)
    assert (len(task.train_groups().unique()), len(task.train_groups())) == (99, 12_933)
    assert (len(task.eval_data()), len(task.public_text())) == (1389, 1745)
