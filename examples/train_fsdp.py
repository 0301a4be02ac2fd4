"""The loop of `train.py` in groups of several ranks, each group sharded with FSDP2.

lightkeeper launch --group g0 --groups 2 --ranks 2 ... -- examples/train_fsdp.py --steps 200
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lightkeeper
from lightkeeper.examples.common import build, optimizer_for, parser, saving
from lightkeeper.examples.gpt import next_byte_loss


def main() -> None:
    """Train until the last step is committed."""
    options = saving(parser("Train a byte-level GPT with lightkeeper, in sharded groups.")).parse_args()
    dist.init_process_group("gloo")  # the ranks of this group; between groups lightkeeper has groups of its own
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    setup = build(options)
    model, data = setup.model, setup.data
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_for(model, options)  # after fully_shard, like the manager: over the shards
    manager = lightkeeper.Manager(
        model, optimizer, seed=options.seed, extras={"loss": (), "tokens": ((), torch.int64)}, place=mesh
    )
    place = manager.place  # which part of every microbatch is this rank's
    if options.checkpoints:  # saving goes by itself from here on
        lightkeeper.Checkpoints(manager, options.checkpoints, every=options.save_every).load()
    for step in manager.steps(until=options.steps, microbatches=options.microbatches):
        optimizer.zero_grad()
        for k in step.microbatches():  # this group's share: the same for all of its ranks
            x, y = (part[place.index :: place.count] for part in data.batch(step.index, k))
            loss = next_byte_loss(model(x), y)
            (loss / step.total).backward()  # fully_shard takes the mean over the ranks
            step.contribute("loss", loss.detach() / step.total / place.count)
            step.contribute("tokens", y.numel())
        lightkeeper.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step.live and step.lead and manager.rank == 0 and step.index % 10 == 0:
            print(f"step {step.index}: loss {float(step.reduced['loss']):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
