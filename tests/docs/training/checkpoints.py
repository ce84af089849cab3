"""Writes what the page on fine-tuning needs: a small random model with its tokenizer, and reviews.

    python -m tests.docs.training.checkpoints FOLDER bert|gpt2

It runs in a process of its own, because transformers gives warnings when it makes models.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import fl_tasks.torchvision_compat  # noqa: F401 - before transformers, which imports torchvision

GOOD, BAD = ("good", "fine", "lovely", "great", "warm"), ("bad", "dull", "awful", "poor", "cold")
OTHER = ("the", "film", "was", "and", "actors", "music", "story")
WORDS = ("[PAD]", "[UNK]", *GOOD, *BAD, *OTHER)


def write_reviews(path: Path, count: int = 160) -> None:
    """Reviews of three to eight words; two of them show the label."""
    generator = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(count):
            words = generator.choices(OTHER, k=generator.randint(1, 6))
            words += generator.choices(GOOD if number % 2 else BAD, k=2)
            generator.shuffle(words)
            writer.writerow([" ".join(words), number % 2])


def write_checkpoint(folder: Path, kind: str) -> None:
    """A model of two layers of width 16 with random weights, and a tokenizer of words."""
    from transformers import (  # noqa: PLC0415 - seconds
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
    )

    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=len(WORDS), n_positions=16, n_embd=16, n_layer=2, n_head=2)
        GPT2LMHeadModel(config).save_pretrained(folder)
        return
    bert = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        initializer_range=0.3,
        hidden_dropout_prob=0.0,
    )
    BertForSequenceClassification(bert).save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_checkpoint(target / "checkpoint", sys.argv[2])
    write_reviews(target / "reviews.csv")
