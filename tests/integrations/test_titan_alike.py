"""Groups of a torchtitan job whose configs would part them are refused by the name of what differs."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan")

from lightkeeper.integrations.torchtitan import cpu

cpu.install()

from lightkeeper.examples import train_titan  # noqa: E402
from lightkeeper.integrations.torchtitan.alike import SHOWN_CHARS_MAX, alike_in  # noqa: E402


def differing(change) -> set[str]:
    before, after = (train_titan.plain_tiny() for _ in range(2))
    assert alike_in(before) == alike_in(after)
    change(after)
    return {name for name, value in alike_in(before).items() if alike_in(after)[name] != value}


def test_what_parts_the_groups_is_named() -> None:
    assert differing(lambda c: setattr(c.training, "max_norm", 0.1)) == {"training.max_norm"}
    assert differing(lambda c: setattr(c.lr_scheduler, "warmup_steps", 7)) == {"lr_scheduler"}
    assert differing(lambda c: setattr(c.metrics, "log_freq", 3)) == {"metrics.log_freq"}
    assert differing(lambda c: setattr(c.dataloader, "dataset", "c4")) == {"dataloader"}
    assert differing(lambda c: c.optimizer.param_groups[0].optimizer_kwargs.update(lr=1.0)) == {"optimizer"}


def test_where_data_lie_may_differ() -> None:
    assert differing(lambda c: setattr(c.dataloader, "dataset_path", "/elsewhere")) == set()


def test_long_values_are_short_and_still_tell_apart() -> None:
    assert all(len(value) < SHOWN_CHARS_MAX + 40 for value in alike_in(train_titan.plain_tiny()).values())
