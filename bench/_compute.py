"""The work that the benches' trainers do: matrix products, or time that passes."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 1024


def stack(gradient_mb: float, seed: int = 0) -> nn.Sequential:
    """Linear layers of 1024 x 1024 (4.2 MB of float32 gradients each), as many as fit `gradient_mb`."""
    torch.manual_seed(seed)
    layers = max(1, round(gradient_mb * 1e6 / (4 * WIDTH * (WIDTH + 1))))
    return nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
