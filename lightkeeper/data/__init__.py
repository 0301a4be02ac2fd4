"""Which samples a microbatch holds: a pure function of (seed, step, microbatch)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightkeeper.data.permutation import permuted
from lightkeeper.data.sampler import DealtSampler, Schedule, samples

if TYPE_CHECKING:
    from lightkeeper.data.text import ByteText, TextBatches

__all__ = ["ByteText", "DealtSampler", "Schedule", "TextBatches", "permuted", "samples"]


def __getattr__(name: str) -> Any:
    if name in ("ByteText", "TextBatches"):
        from lightkeeper.data import text

        return getattr(text, name)
    raise AttributeError(f"module 'lightkeeper.data' has no attribute {name!r}")
