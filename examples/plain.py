"""The loop of `train.py` without lightkeeper: one process, all microbatches, the same numbers."""

from __future__ import annotations

import torch

from lightkeeper.examples.common import build, parser
from lightkeeper.examples.gpt import next_byte_loss


def main() -> None:
    """Train until the last step."""
    setup = build(parser("Train a byte-level GPT in one process.").parse_args())
    model, optimizer, data, options = setup.model, setup.optimizer, setup.data, setup.arguments
    for step in range(options.steps):
        optimizer.zero_grad()
        total = 0.0
        for k in range(options.microbatches):
            x, y = data.batch(step, k)
            loss = next_byte_loss(model(x), y)
            (loss / options.microbatches).backward()
            total += float(loss.detach()) / options.microbatches
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {total:.4f}", flush=True)


if __name__ == "__main__":
    main()
