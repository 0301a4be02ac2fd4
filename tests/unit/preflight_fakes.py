"""What the checks look at, made up: an NVML, and trees of sysfs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


class FakeNvml:
    """The functions of `pynvml` that are called, of GPUs whose state is set by the test.

    Args:
        gpus: how many, all sound.
    """

    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = NVML_CLOCK_SM = 0
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1
    NVML_NVLINK_ERROR_DL_CRC_FLIT, NVML_NVLINK_ERROR_DL_CRC_DATA = 2, 3

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: int = 2) -> None:
        self.gpus: list[dict[str, Any]] = [
            {"name": "NVIDIA H200", "pids": [], "used": 500 << 20, "reasons": 1, "ecc": 0, "rows": (0, 0, 0, 0),
             "links": {0: True, 1: True}, "link_errors": {}}
            for _ in range(gpus)
        ]  # fmt: skip
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.open, "asked without nvmlInit"
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetName(self, gpu: dict[str, Any]) -> str:
        return str(gpu["name"])

    def nvmlDeviceGetUUID(self, gpu: dict[str, Any]) -> str:
        return f"GPU-{self.gpus.index(gpu)}"

    def nvmlDeviceGetTemperature(self, gpu: dict[str, Any], kind: int) -> int:
        return 45

    def nvmlDeviceGetPowerUsage(self, gpu: dict[str, Any]) -> int:
        return 90_000

    def nvmlDeviceGetUtilizationRates(self, gpu: dict[str, Any]) -> Any:
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetMemoryInfo(self, gpu: dict[str, Any]) -> Any:
        return SimpleNamespace(used=gpu["used"], total=141 << 30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: dict[str, Any]) -> int:
        return int(gpu["reasons"])

    def nvmlDeviceGetTotalEccErrors(self, gpu: dict[str, Any], kind: int, counter: int) -> int:
        return int(self._told(gpu["ecc"]))

    def nvmlDeviceGetRemappedRows(self, gpu: dict[str, Any]) -> Any:
        return self._told(gpu["rows"])

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: dict[str, Any]) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in gpu["pids"]]

    def nvmlDeviceGetClockInfo(self, gpu: dict[str, Any], clock: int) -> int:
        return 345

    def nvmlDeviceGetMaxClockInfo(self, gpu: dict[str, Any], clock: int) -> int:
        return 1980

    def nvmlDeviceGetNvLinkState(self, gpu: dict[str, Any], link: int) -> int:
        if link not in gpu["links"]:
            raise self.NVMLError("Not Supported")
        return int(gpu["links"][link])

    def nvmlDeviceGetNvLinkErrorCounter(self, gpu: dict[str, Any], link: int, counter: int) -> int:
        return int(gpu["link_errors"].get((link, counter), 0))

    def _told(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value


def tree(root: Path, **files: str | int) -> Path:
    """Files below a folder; a double underscore stands for a slash."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def port(root: Path, device: str, **changed: str | int) -> Path:
    """An InfiniBand port that is active."""
    files: dict[str, str | int] = {
        "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "counters__symbol_error": 7,
    }  # fmt: skip
    return tree(root, **{f"{device}__ports__1__{name}": value for name, value in (files | changed).items()})
