"""Lets torchtitan 0.3 train on a machine without an accelerator; for tests and a first try, never needed on a GPU.

`install()` must run before anything else of torchtitan is imported.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def install() -> bool:
    """Puts in the place of four things that only CUDA has what a CPU has; nothing where there is an accelerator.

    Returns:
        Whether it did so.
    """
    if torch.accelerator.is_available():
        return False
    torch._utils._get_available_device_type = lambda: "cpu"
    if importlib.util.find_spec("triton") is None:
        sys.modules[KERNELS] = _Kernels(KERNELS)
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.utils as dist_utils

    metrics.build_device_memory_monitor = _NoMemoryMonitor
    dist_utils.set_pg_timeouts = _set_pg_timeouts
    return True


def on_cpu(spec: Any, positions_max: int = 512) -> Any:
    """A llama-like model spec with what gloo and a CPU can do: plain attention, sums as sums.

    Args:
        spec: torchtitan's `ModelSpec`; changed in place.
        positions_max: longest sequence, for the rotary tables.
    """
    from dataclasses import replace

    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = replace(layer.attention.rope, max_seq_len=positions_max)
    spec.parallelize_fn = _summing(spec.parallelize_fn)
    return spec


def _summing(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Torchtitan's gradient divide factor of 1 makes FSDP ask for an operation that gloo does not have."""

    def parallelized(model: nn.Module, **more: Any) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule

        model = parallelize(model, **more)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
        return model

    return parallelized


class _Kernels(types.ModuleType):
    """Triton kernels of expert parallelism, which an import wants and nothing here calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{name} needs triton and CUDA")

        return missing


class _NoMemoryMonitor:
    """A CPU has no device memory to watch."""

    device_name, device_index, device_capacity_gib = "cpu", 0, 0.0

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Nothing to reset."""


def _set_pg_timeouts(timeout: Any, parallel_dims: Any) -> None:
    dist.barrier()
    meshes = parallel_dims.get_all_one_dimensional_meshes().values()
    for group in [None, *(mesh.get_group() for mesh in meshes)]:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
