"""What `train.py` and `plain.py` have in common: their options, the model, the optimizer and the data."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from lightkeeper.data import ByteText, DealtSampler, TextBatches
from lightkeeper.examples.gpt import Gpt, GptConfig
from lightkeeper.examples.text import Text, standard_library


@dataclass(frozen=True)
class Setup:
    """Everything a training loop needs.

    Attributes:
        model: the language model.
        optimizer: AdamW over its parameters.
        data: `data.batch(step, k)` gives x and y.
        text: what is being read.
        arguments: the parsed options.
    """

    model: Gpt
    optimizer: torch.optim.Optimizer
    data: TextBatches
    text: Text
    arguments: argparse.Namespace


def parser(description: str) -> argparse.ArgumentParser:
    """The options of both examples."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--steps", type=int, default=100, help="training steps")
    options.add_argument("--microbatches", type=int, default=12, help="microbatches of a step, over all groups")
    options.add_argument("--size", type=int, default=8, help="sequences in a microbatch")
    options.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    options.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    options.add_argument("--threads", type=int, default=1, help="torch threads; must be the same in all groups")
    options.add_argument("--text", type=Path, help="train on this file instead of Python's standard library")
    return options


def saving(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options of a run that saves."""
    options.add_argument("--checkpoints", type=Path, help="save here, and go on from the newest one that is whole")
    options.add_argument("--save-every", type=int, default=0, help="steps between saves; 0: as often as it pays")
    return options


def build(arguments: argparse.Namespace) -> Setup:
    """Model, optimizer and data for these options."""
    torch.set_num_threads(arguments.threads)
    text = _read(arguments.text)
    model = Gpt(GptConfig(), seed=arguments.seed)
    optimizer = optimizer_for(model, arguments)
    windows = ByteText(text.content, model.config.context)
    sampler = DealtSampler(len(windows), arguments.size, arguments.microbatches, arguments.seed)
    return Setup(model, optimizer, TextBatches(windows, sampler), text, arguments)


def optimizer_for(model: Gpt, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW over the model's parameters as they are now."""
    return torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)


def _read(path: Path | None) -> Text:
    if path is None:
        return standard_library()
    content = path.read_bytes()
    return Text(content, 1, hashlib.sha256(content).hexdigest(), str(path))
