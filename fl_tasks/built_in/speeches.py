"""Reads tiny Shakespeare: the text of each speaker, from speeches that begin with a line `SPEAKER:`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fl_tasks.base import TaskError

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
