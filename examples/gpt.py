"""A byte-level GPT, written plainly: token and position embeddings, pre-norm blocks, a tied output layer.

The architecture is GPT-2's (Radford et al., 2019): LayerNorm before attention and before the feed-forward
part, GELU, residual projections initialised smaller by the square root of their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GptConfig:
    """Sizes of the model; the defaults train on one CPU thread.

    Attributes:
        vocabulary: number of tokens, 256 for bytes.
        context: longest sequence.
        layers: number of blocks.
        heads: attention heads; must divide `width`.
        width: features of a token.
    """

    vocabulary: int = 256
    context: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 96


class Attention(nn.Module):
    """Causal self-attention with all heads in one matrix product."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, time, width] -> same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a feed-forward part, each around a residual."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_forward = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, time, width] -> same shape."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.project(F.gelu(self.expand(self.norm_forward(x))))


class Gpt(nn.Module):
    """The model.

    Args:
        config: its sizes.
        seed: seed of the initial weights; the global random state is left as it was.
    """

    def __init__(self, config: GptConfig | None = None, seed: int = 0) -> None:
        super().__init__()
        self.config = config = config or GptConfig()
        if config.width % config.heads:
            raise ValueError(f"width {config.width} is not a multiple of heads {config.heads}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # biases and norms keep torch's zeros and ones
            shrink = (2 * self.config.layers) ** 0.5 if name.endswith("project.weight") else 1.0
            nn.init.normal_(parameter, std=0.02 / shrink)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Next-token logits.

        Args:
            x: tokens, int64 of shape [batch, time], time at most `context`.

        Returns:
            float32 of shape [batch, time, vocabulary].
        """
        places = torch.arange(x.shape[1], device=x.device)
        h = self.tokens(x) + self.positions(places)
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.tokens.weight)


def next_byte_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy in nats: logits [batch, time, vocabulary], y int64 [batch, time]."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())
