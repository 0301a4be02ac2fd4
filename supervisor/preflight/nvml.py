"""What the checks ask of NVML beyond the counters that an incident's evidence holds (`manager/evidence/gpu.py`)."""

from __future__ import annotations

import importlib
from typing import Any

from lightkeeper.manager.evidence.gpu import gpu_counters, has_nvml

NOT_INSTALLED = "nvidia-ml-py is not installed (pip install nvidia-ml-py)"

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean a fault of cooling or power, by NVML's reference,
# "NvmlClocksEventReasons"; the others are idleness, a cap that was set, or the usual limit of power.
BAD_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def counters(nvml: Any = None) -> tuple[list[dict[str, Any]], str]:
    """As `gpu_counters`; without the library there are none, and that is why."""
    if nvml is None and not has_nvml():
        return [], NOT_INSTALLED
    return gpu_counters(nvml)


def why_no_gpu(nvml: Any = None) -> str:
    """Why there is no GPU to look at; empty if there is one."""
    found, why = counters(nvml)
    return "" if found else f"no GPU: {why or 'NVML counts none'}"


def versions(nvml: Any = None) -> dict[str, Any]:
    """Driver, and the newest CUDA that it can run (``12.8``); None where there is no NVML."""
    if nvml is None:
        if not has_nvml():
            return {"driver": None, "driver_cuda": None}
        nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {"driver": None, "driver_cuda": None}
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return {"driver": nvml.nvmlSystemGetDriverVersion(), "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}
    finally:
        nvml.nvmlShutdown()


def nvlinks(nvml: Any = None) -> dict[int, dict[int, dict[str, Any]]]:
    """By GPU and link: whether it is active, and its error counters; links that a GPU does not have are left out."""
    nvml = importlib.import_module("pynvml") if nvml is None else nvml
    nvml.nvmlInit()
    try:
        found: dict[int, dict[int, dict[str, Any]]] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            links = {link: _link_of(nvml, gpu, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)}
            found[index] = {link: state for link, state in links.items() if state is not None}
        return found
    finally:
        nvml.nvmlShutdown()


def _link_of(nvml: Any, gpu: Any, link: int) -> dict[str, Any] | None:
    try:
        active = nvml.nvmlDeviceGetNvLinkState(gpu, link) == nvml.NVML_FEATURE_ENABLED
    except nvml.NVMLError:
        return None
    errors: dict[str, int] = {}
    for name in ("REPLAY", "RECOVERY", "CRC_FLIT", "CRC_DATA"):
        try:
            counter = getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name}")
            errors[name.lower()] = nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, counter)
        except nvml.NVMLError:
            continue  # newer GPUs do not have it
    return {"active": active, "errors": errors}


def clocks(nvml: Any = None) -> list[dict[str, Any]]:
    """By GPU, the clock of its multiprocessors now and at most, in MHz; empty for one that does not tell."""
    nvml = importlib.import_module("pynvml") if nvml is None else nvml
    nvml.nvmlInit()
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            try:
                now = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
                found.append({"sm_mhz": now, "sm_mhz_max": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)})
            except nvml.NVMLError:
                found.append({})
        return found
    finally:
        nvml.nvmlShutdown()
