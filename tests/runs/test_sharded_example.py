"""S79: one script, `examples/train_fsdp.py`, as one group, as several, and with several ranks in each."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from harness import Job

from lightkeeper.events import schema
from lightkeeper.events.summary import fingerprints_equal, one_lineage, samples_exactly_once, steps_lost
from lightkeeper.examples.common import build, parser
from lightkeeper.examples.gpt import next_byte_loss

STEPS, MICROBATCHES = 12, 4
WORDS = ["--steps", str(STEPS), "--microbatches", str(MICROBATCHES)]
SCRIPT = Path(__file__).parents[2] / "examples" / "train_fsdp.py"

pytestmark = pytest.mark.long


@cache
def plain() -> list[float]:
    """The losses of one process without lightkeeper."""
    setup = build(parser("plain").parse_args(WORDS))
    losses = []
    for step in range(STEPS):
        setup.optimizer.zero_grad()
        whole = 0.0
        for k in range(MICROBATCHES):
            x, y = setup.data.batch(step, k)
            loss = next_byte_loss(setup.model(x), y) / MICROBATCHES
            loss.backward()
            whole += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
        setup.optimizer.step()
        losses.append(whole)
    return losses


@pytest.mark.parametrize(
    ("groups", "ranks", "fault"), [(1, 1, ""), (2, 1, ""), (2, 2, ""), (2, 2, "kill:g1/1:compute:5")]
)
def test_the_example(job: Job, groups: int, ranks: int, fault: str) -> None:
    job.settings.update(groups=groups, ranks=ranks, outage_budget_s=60)
    job.start_lighthouse()
    for i in range(groups):
        job.start_command(f"g{i}", [str(SCRIPT), *WORDS], fault)
    facts = job.finish(within_s=120)
    survivors = {f"g{i}" for i in range(groups)} - ({"g1"} if fault else set())
    assert facts.codes == {f"g{i}": 0 if f"g{i}" in survivors else 137 for i in range(groups)}
    for rule in (samples_exactly_once(facts.events, STEPS), one_lineage(facts.events), steps_lost(facts.events)):
        assert rule.holds, rule.why
    assert fingerprints_equal(facts.events).holds
    assert len(facts.all(schema.FaultInjected)) == bool(fault) and facts.lost.keys() == ({"g1"} if fault else set())
    for group in survivors:
        for rank in range(ranks):
            losses = {c.step: c.loss for c in facts.all(schema.Committed, group=group, rank=rank)}
            assert losses == pytest.approx(dict(enumerate(plain())), rel=2e-3)
            told = {c.tokens for c in facts.all(schema.Committed, group=group, rank=rank)}
            assert told == {MICROBATCHES * 8 * 64}
