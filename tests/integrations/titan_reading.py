"""A job whose groups read torchtitan's data, and what torchtitan alone reads; import it after `cpu.install()`."""

from __future__ import annotations

from typing import Any

import torch
from titan_groups import Job
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer

from lightkeeper.integrations.torchtitan.data import SlotStreams

LENGTH = 32


class Bytes(BaseTokenizer):
    """A token is a byte."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, **_: Any) -> list[int]:
        return [0, *text.encode(), 1]

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


GIVEN: dict[str, Any] = {
    "tokenizer": Bytes(), "seq_len": LENGTH, "local_batch_size": 2, "snapshot_every_n_steps": None,
}  # fmt: skip


def job_of(config: Any, microbatches: int, places: int, groups: int, state_kb: int = 16) -> Job:
    stand_in = SlotStreams.around(config, microbatches, state_kb)
    return Job(
        lambda places, place: stand_in.build(dp_world_size=places, dp_rank=place, **GIVEN), microbatches, places, groups
    )


def same(one: Any, other: Any) -> bool:
    return one[0].keys() == other[0].keys() and all(
        torch.equal(mine, theirs)
        for mine, theirs in zip([*one[0].values(), one[1]], [*other[0].values(), other[1]], strict=True)
    )


def reads_what_hsdp_reads(job: Job, config: Any) -> None:
    """Microbatch k's part p of step s is batch s of rank k * places + p of torchtitan alone, on as many ranks."""
    ranks = job.microbatches * job.places
    given = {**GIVEN, "snapshot_every_n_steps": 1}
    alone = [iter(config.build(dp_world_size=ranks, dp_rank=rank, **given)) for rank in range(ranks)]
    for step in range(job.step):
        tokens = 0
        for rank, batches in enumerate(alone):
            expected = next(batches)
            assert same(job.read.pop((step, *divmod(rank, job.places))), expected), (step, rank)
            tokens += int((expected[1] != IGNORE_INDEX).sum())
        assert job.tokens[step] == tokens
    assert not job.read
