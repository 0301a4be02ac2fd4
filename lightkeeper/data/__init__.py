"""Which samples a microbatch holds, a pure function of (seed, step, microbatch); loaders that read them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightkeeper.data.permutation import permuted
from lightkeeper.data.sampler import DealtSampler, Schedule, samples

if TYPE_CHECKING:
    from lightkeeper.data.share import ShareLoader
    from lightkeeper.data.streams import StreamLoader
    from lightkeeper.data.text import ByteText, TextBatches

__all__ = ["ByteText", "DealtSampler", "Schedule", "ShareLoader", "StreamLoader", "TextBatches", "permuted", "samples"]


_HOMES = {  # what needs torch is loaded on first use
    "ByteText": "lightkeeper.data.text",
    "ShareLoader": "lightkeeper.data.share",
    "StreamLoader": "lightkeeper.data.streams",
    "TextBatches": "lightkeeper.data.text",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lightkeeper.data' has no attribute {name!r}")
