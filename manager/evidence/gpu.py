"""What NVML says of the node's GPUs, where `nvidia-ml-py` and a GPU are. Nothing here imports it on its own account."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_COUNTERS = (
    ("temperature_c", lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
    ("power_w", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    ("utilization_percent", lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    ("memory_used_bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ("memory_total_bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ("throttle_reasons", lambda nvml, gpu: hex(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))),
    (
        "ecc_uncorrected",
        lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    ),
    ("remapped_rows", lambda nvml, gpu: list(nvml.nvmlDeviceGetRemappedRows(gpu))),
    ("pids", lambda nvml, gpu: [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]),
)  # fmt: skip


def has_nvml() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("pynvml") is not None


def gpu_counters(nvml: Any = None) -> tuple[list[dict[str, Any]], str]:
    """Counters of each GPU of this node.

    Args:
        nvml: the library; None imports it.

    Returns:
        By GPU its index, name, uuid and counters (one that it does not have holds the error's text); and why there are
        none, empty if there are.
    """
    nvml = importlib.import_module("pynvml") if nvml is None else nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [], f"NVML: {error}"
    try:
        return [_counters_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount())], ""
    except nvml.NVMLError as error:
        return [], f"NVML: {error}"
    finally:
        nvml.nvmlShutdown()


def _counters_of(nvml: Any, index: int) -> dict[str, Any]:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    found = {"index": index, "name": nvml.nvmlDeviceGetName(gpu), "uuid": nvml.nvmlDeviceGetUUID(gpu)}
    for name, read in _COUNTERS:
        try:
            found[name] = read(nvml, gpu)
        except nvml.NVMLError as error:
            found[name] = str(error)
    return found
