"""Next characters of tiny Shakespeare by speaker, with all weights or with low-rank adapters (LoRA) trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fl_tasks.adapters import add_lora, freeze_a, load_weights
from fl_tasks.base import Classifier, Examples, Shard, TaskError
from fl_tasks.built_in.options import true_or_false, whole_number
from fl_tasks.data.examples import checked_fraction, split_shard
from fl_tasks.models import CausalTransformer

VOCABULARY = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The 65 characters of tiny Shakespeare; a token is a character's place in this text."""

FILE = Path("tinyshakespeare") / "input.txt"


def read_speakers(data_root: Path) -> dict[str, str]:
    """Speaker -> all speeches, joined by empty lines, in order of first appearance.

    Raises TaskError if the file is missing or has no speeches.
    """
    path = data_root / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"expected the text of tiny Shakespeare in {path}, which cannot be read: {error}. Save the file input.txt"
            " of Karpathy's char-rnn there, or set the task's option data_root to the folder above"
        ) from error
    speeches: dict[str, list[str]] = {}
    for paragraph in text.split("\n\n"):
        speaker, colon, speech = paragraph.strip("\n").partition(":\n")
        if colon and speech:
            speeches.setdefault(speaker, []).append(speech)
    if not speeches:
        raise TaskError(f"expected speeches in {path}, each with a first line such as ROMEO:, got none")
    return {speaker: "\n\n".join(parts) for speaker, parts in speeches.items()}


def encode(text: str) -> Tensor:
    """The tokens of a text, int64 [characters]. Raises TaskError for characters outside the vocabulary."""
    unknown = sorted(set(text) - set(VOCABULARY))
    if unknown:
        raise TaskError(f"expected the 65 characters of tiny Shakespeare, got also {''.join(unknown)!r}: replace them")
    place = {character: index for index, character in enumerate(VOCABULARY)}
    return torch.tensor([place[character] for character in text], dtype=torch.int64)


def windows(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and next characters [n, length] of pieces that do not overlap; a shorter rest is left out."""
    count = max(len(tokens) - 1, 0) // length
    used = count * length
    return tokens[:used].view(count, length), tokens[1 : used + 1].view(count, length)


LENGTH = 64
"""Characters of an example."""

HELD_OUT = 0.1
"""The last tenth of each speaker's text is held out."""

HEADS = 4

ADAPTED = ("qkv", "out", "up", "down")
"""The linear layers of each block, which get adapters."""


class Shakespeare(Classifier):
    """Sequences of 64 characters, [n, 64] int64, with the next character at each position as target, [n, 64].

    A speaker with at least `least_characters` is a group of the partition "natural": 99 speakers by default. All other
    text is `public_text`, for training before federated learning.

    data_root: folder above tinyshakespeare/input.txt. base: a safetensors file with the transformer's first weights; ""
    for random ones. lora: rank of the adapters; 0 trains all weights, else these are frozen and the extra `lora` is
    needed. train_a: train both adapter matrices, instead of B alone (FFA-LoRA).
    width, layers: size of the transformer; width is a multiple of its 4 heads.
    client_eval_fraction: share of each shard, in [0, 1), that is held out for evaluation on clients.
    """

    held_out = "the last tenth of each speaker's text"
    own_options = ("data_root", "base")

    def __init__(  # noqa: PLR0913 - the task's options
        self,
        data_root: str = "data",
        *,
        base: str = "",
        lora: int = 0,
        train_a: bool = False,
        width: int = 96,
        layers: int = 3,
        least_characters: int = 2000,
        client_eval_fraction: float = 0.0,
    ) -> None:
        self.data_root = Path(data_root).expanduser()
        self.base = Path(base).expanduser() if base else None
        self.rank = whole_number("lora", lora)
        self.least_characters = whole_number("least_characters", least_characters, 1)
        self.train_a = true_or_false("train_a", train_a)
        self.width, self.layers = whole_number("width", width, 4), whole_number("layers", layers, 1)
        if self.width % HEADS:
            raise TaskError(f"width: expected a multiple of {HEADS}, the heads of attention, got {width}")
        if train_a and not self.rank:
            raise TaskError("the option train_a is for adapters: set the option lora to their rank, such as 8")
        self.client_eval_fraction = checked_fraction(client_eval_fraction)

    def model(self) -> nn.Module:
        """A transformer, by default of 354,401 parameters; lora = 8 adds 20,736 in B and 16,128 in A then."""
        model = CausalTransformer(len(VOCABULARY), LENGTH, width=self.width, layers=self.layers, heads=HEADS)
        if self.base is not None:
            load_weights(model, self.base)
        if not self.rank:
            return model
        adapted = add_lora(model, self.rank, ADAPTED)
        return adapted if self.train_a else freeze_a(adapted)

    def train_data(self, shard: Shard) -> Examples:
        """The shard without its held-out part."""
        return self._shard_parts(shard)[0]

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The end of each speaker's text, or a shard's own held-out part."""
        if shard is not None:
            return self._shard_parts(shard)[1]
        return self._cut(self._speakers(), train=False)[0]

    def train_groups(self) -> Tensor:
        """The speaker of each example, from 0 in order of first appearance."""
        return self._cut(self._speakers(), train=True)[1]

    def public_text(self) -> Examples:
        """Text of the speakers with fewer characters than `least_characters`, who are no groups."""
        texts = [text for text in read_speakers(self.data_root).values() if len(text) < self.least_characters]
        return Examples(*windows(encode("\n\n".join(texts)), LENGTH))

    def _shard_parts(self, shard: Shard) -> tuple[Examples, Examples]:
        return split_shard(shard.of(self._cut(self._speakers(), train=True)[0]), self.client_eval_fraction)

    def _speakers(self) -> list[Tensor]:
        texts = [text for text in read_speakers(self.data_root).values() if len(text) >= self.least_characters]
        if not texts:
            raise TaskError(f"no speaker has {self.least_characters} characters: lower the option least_characters")
        return [encode(text) for text in texts]

    def _cut(self, speakers: list[Tensor], *, train: bool) -> tuple[Examples, Tensor]:
        """Examples of all speakers, and the speaker of each."""
        pieces = [windows(_part(tokens, train=train), LENGTH) for tokens in speakers]
        inputs, targets = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        counts = torch.tensor([len(part) for part, _ in pieces])
        return Examples(inputs, targets), torch.repeat_interleave(torch.arange(len(pieces)), counts)


def _part(tokens: Tensor, *, train: bool) -> Tensor:
    end = len(tokens) - int(HELD_OUT * len(tokens))
    return tokens[:end] if train else tokens[end:]
