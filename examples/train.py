"""A training loop that outlives its replica groups. Compare with `plain.py`: the loop is the same.

lightkeeper launch --group g0 --groups 3 ... -- examples/train.py --steps 200
"""

from __future__ import annotations

import lightkeeper
from lightkeeper.examples.common import build, parser, saving
from lightkeeper.examples.gpt import next_byte_loss


def main() -> None:
    """Train until the last step is committed."""
    arguments = saving(parser("Train a byte-level GPT with lightkeeper."))
    arguments.add_argument("--workers", type=int, default=0, help="processes that read ahead; 0: read in the loop")
    setup = build(arguments.parse_args())
    model, optimizer, options = setup.model, setup.optimizer, setup.arguments
    manager = lightkeeper.Manager(model, optimizer, seed=options.seed, extras={"loss": (), "tokens": ()})
    data = lightkeeper.data.ShareLoader(setup.data.text, setup.data.sampler, manager, workers=options.workers)
    if options.checkpoints:  # saving goes by itself from here on
        lightkeeper.Checkpoints(manager, options.checkpoints, every=options.save_every).load()
    for step in manager.steps(until=options.steps, microbatches=options.microbatches):
        optimizer.zero_grad()
        for k in step.microbatches():  # this group's share; it grows if a peer is lost during the step
            x, y = data.batch(step.index, k)
            loss = next_byte_loss(model(x), y)
            (loss / step.total).backward()
            step.contribute("loss", loss.detach() / step.total)
            step.contribute("tokens", y.numel())
        lightkeeper.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # leaving the inner loop: reduced, voted, committed
        if step.live and step.lead and step.index % 10 == 0:
            print(f"step {step.index}: loss {float(step.reduced['loss']):.4f}", flush=True)


if __name__ == "__main__":
    main()
