"""Keeps a PyTorch training run going when replica groups die, freeze or come back.

The public names are loaded on first use, so that `import lightkeeper` (and with it the manager process and
the command line) imports neither torch nor grpc.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightkeeper import data
    from lightkeeper.checkpoint.checkpoints import Checkpoints
    from lightkeeper.manager.clip import clip_grad_norm_
    from lightkeeper.manager.fingerprint import fingerprint
    from lightkeeper.manager.settings import Settings
    from lightkeeper.manager.step import Step
    from lightkeeper.manager.trainer import Manager

__version__ = "0.1.0"

__all__ = ["Checkpoints", "Manager", "Settings", "Step", "__version__", "clip_grad_norm_", "data", "fingerprint"]

_HOMES = {
    "Checkpoints": "lightkeeper.checkpoint.checkpoints",
    "Manager": "lightkeeper.manager.trainer",
    "Settings": "lightkeeper.manager.settings",
    "Step": "lightkeeper.manager.step",
    "clip_grad_norm_": "lightkeeper.manager.clip",
    "fingerprint": "lightkeeper.manager.fingerprint",
}


def __getattr__(name: str) -> Any:
    if name == "data":
        return import_module("lightkeeper.data")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lightkeeper' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
