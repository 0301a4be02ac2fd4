"""What of a torchtitan config must be the same in all groups, because each of them does every optimizer step itself.

A group that comes with another is refused by the name of the section. Where data lie (`dataset_path`), how many workers
read them, folders and how a model is spread or compiled may differ, or are compared elsewhere.
"""

from __future__ import annotations

import json
import re
from typing import Any

import xxhash

SHOWN_CHARS_MAX = 200
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def alike_in(config: Any) -> dict[str, str]:
    """Name and value of each.

    Args:
        config: of a `Trainer`, as the user gave it.
    """
    training = config.training
    found: dict[str, Any] = {
        f"training.{name}": getattr(training, name)
        for name in ("local_batch_size", "seq_len", "max_norm", "dtype", "mixed_precision_param")
    }
    found["metrics.log_freq"] = config.metrics.log_freq
    found["dataloader"] = (
        f"{type(config.dataloader).__qualname__} of {_text(getattr(config.dataloader, 'dataset', ''))}"
    )
    for name in ("optimizer", "lr_scheduler", "loss"):
        found[name] = getattr(config, name).to_dict()
    return {name: _text(value) for name, value in found.items()}


def _text(value: Any) -> str:
    """The same in every process; long ones as a hash behind their beginning."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=repr)
    text = _ADDRESS.sub("", text)
    if len(text) <= SHOWN_CHARS_MAX:
        return text
    return f"{text[:SHOWN_CHARS_MAX]}... (xxh3 {xxhash.xxh3_64_hexdigest(text.encode())})"
