"""The time-outs of the group's own process groups: what they are if the script does not say, and what is too short.

While another group heals, a rank stands in a reduce across the groups, and the others of its group wait for it in a
collective of their own. torch ends that after ten minutes over NCCL, and with it a group that is well.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.manager import ncclenv
from lightkeeper.manager.timeouts import Timeouts
from lightkeeper.words import say

MODULE = "torch.distributed.distributed_c10d"
_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")  # what its functions look up when they are called


def set_default(timeout_s: float) -> None:
    """What `init_process_group` and `new_group` take from now on where nobody tells them; it imports nothing.

    Args:
        timeout_s: in seconds.
    """
    module = sys.modules.get(MODULE)
    if module is not None:
        _set(module, timeout_s)
        return
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _AtImport)]:
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, _AtImport(timeout_s))


def settle(timeouts: Timeouts, on_gpu: bool) -> None:
    """Raises the time-outs of process groups that have torch's own default, and refuses others that are too short.

    Also those that are made later have `collective_timeout_s` from now on, if nobody says otherwise. On a GPU the
    variables that NCCL's groups read are looked at, too (`ncclenv.py`).

    Raises:
        UsageError: the script gave a time-out that is not above `reduce_timeout_s`, or a variable is wrong.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    if on_gpu:
        made = dist.is_initialized() and any("nccl" in name for name, _ in dist.distributed_c10d._world.pg_map.values())
        for line in ncclenv.settle(os.environ, timeouts, made):
            say(f"lightkeeper: {line}")
    set_default(timeouts.collective_timeout_s)
    if not dist.is_initialized():
        return
    for group, backends in _groups_of_several():
        has_s = min(backend.options._timeout.total_seconds() for backend in backends)
        if has_s > timeouts.reduce_timeout_s:
            continue
        if has_s not in _torchs_own():
            raise UsageError(
                f"the time-out {has_s:g} s that the script gave to a process group must be above "
                f"{timeouts.said('reduce_timeout_s')}: a group's ranks wait for the one that stands in a reduce; leave "
                "it out of init_process_group and new_group, or lower outage_budget_s"
            )
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeouts.collective_timeout_s), group)


def _groups_of_several() -> Iterator[tuple[Any, list[Any]]]:
    """The process groups with more than this rank, each with its backends that have a time-out."""
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() > 1:
            backends = [group._get_backend(device) for device in group._device_types]
            backends = [backend for backend in backends if hasattr(getattr(backend, "options", None), "_timeout")]
            if backends:
                yield group, backends


def _torchs_own() -> set[float]:
    from torch.distributed import constants

    own = [getattr(constants, name, None) for name in _DEFAULTS]
    return {value.total_seconds() for value in own if isinstance(value, timedelta)}


def _set(module: ModuleType, timeout_s: float) -> None:
    for name in _DEFAULTS:
        setattr(module, name, timedelta(seconds=timeout_s))


class _AtImport:
    """Finds torch's module as ever, and sets what it shall take once it has been executed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        del path, target
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _set(module, self._timeout_s)

            loader.exec_module = exec_module
        return spec
