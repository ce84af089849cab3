"""A small causal transformer that predicts the next token, with layer norms before attention and feed-forward part."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class CausalTransformer(nn.Module):
    """Decoder with learned positions: token numbers [batch, length] -> scores [batch, tokens, length].

    The classes are the second axis, as cross entropy expects. Initial weights are normal with deviation 0.02, as in
    GPT-2. With 65 tokens and the defaults it has 354,401 parameters.
    """

    def __init__(  # noqa: PLR0913 - the sizes of a network
        self, tokens: int, length: int = 64, *, width: int = 96, layers: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each position; a position sees only itself and those before it."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores.transpose(1, 2)


class Block(nn.Module):
    """Self-attention and a feed-forward part of four times the width, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same shape."""
        x = x + self.out(self._attention(self.qkv(self.attention_norm(x))))
        fed: Tensor = self.down(functional.gelu(self.up(self.feed_norm(x))))
        return x + fed

    def _attention(self, qkv: Tensor) -> Tensor:
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
