"""Whether every GPU multiplies right, in the formats that training uses: integers, whose product is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkeeper.supervisor.preflight.checks.matmul import factors
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok

SIZE = 1024
FORMATS = ("float32", "bfloat16", "float16")


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """On every GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return failed(
            "NVML sees a GPU and torch does not: the driver, or a torch without CUDA", {"torch": torch.__version__}
        )
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    wrong = wrong_products(devices)
    if wrong:
        return failed("; ".join(wrong), {"wrong": wrong})
    return ok(f"exact on {len(devices)} GPUs in {', '.join(FORMATS)}")


def wrong_products(devices: list[Any], size: int = SIZE) -> list[str]:
    """A line for each device and format whose product differs by a bit from the exact one, rounded once.

    Args:
        devices: torch's devices.
        size: of the matrices.
    """
    import numpy as np
    import torch

    left, right = factors(size)
    exact = torch.from_numpy(left.astype(np.float64) @ right.astype(np.float64))
    torch.backends.cuda.matmul.allow_tf32 = False
    # a sum in halves rounds in between, and is then not exact
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    found = []
    for device in devices:
        for name in FORMATS:
            kind = getattr(torch, name)
            product = torch.from_numpy(left).to(device, kind) @ torch.from_numpy(right).to(device, kind)
            different = int((product.cpu() != exact.to(kind)).sum())
            if different:
                found.append(f"{device}: {different} of {size * size} elements are wrong in {name}")
    return found
