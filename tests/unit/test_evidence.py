"""What is kept of an incident: the budget, what is missing and why, the node's own words, stacks, logs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightkeeper.events import schema, signals
from lightkeeper.manager.actions import Collect
from lightkeeper.manager.evidence import collector as collector_module
from lightkeeper.manager.evidence import folder, gpu, handler, kernel, stacks
from lightkeeper.manager.evidence.collector import Collector, in_thread
from lightkeeper.manager.evidence.logclass import log_class
from lightkeeper.manager.settings import Settings

HOLDS = """
import ctypes, sys
from pathlib import Path
from types import SimpleNamespace
from lightkeeper.manager.evidence import handler
if sys.argv[2] != "deaf":
    handler.RankEvidence._hear_signal(SimpleNamespace(_rank=0), Path(sys.argv[1]))
def holds_it_for_ever():
    print("holds", flush=True)
    while True:
        ctypes.PyDLL(None).sleep(600)  # a signal ends one call
holds_it_for_ever()
"""


def made(tmp_path: Path, **more: Any) -> folder.Incident:
    incident = folder.Incident(tmp_path, "incident", "rank 1 was killed", **more)
    incident.make()
    return incident


# ---------------------------------------------------------------- the folder


def test_the_name_sorts_by_time_and_says_whose_it_is() -> None:
    assert folder.folder_name(0.0, "g1", 7, "left out") == "19700101T000000Z-g1-step7-left-out"


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    incident = made(tmp_path, bytes_max=100)
    assert incident.put("ranks", b"x" * 60)
    assert not incident.put("stacks-rank0", b"y" * 41) and incident.put("log-rank0", b"z" * 40)
    event = incident.event(0.25)
    assert event.folder == "incidents/incident" and event.taken == {"ranks": 60, "log-rank0": 40}
    assert event.missing == {"stacks-rank0": "41 bytes do not fit into the 40 that are left"}
    assert sorted(path.name for path in incident.path.iterdir()) == ["log-rank0.txt", "ranks.txt"]


def test_the_run_has_a_budget_too(tmp_path: Path) -> None:
    made(tmp_path).put("ranks", b"x" * 60)
    second = made(tmp_path, run_bytes_max=100)
    assert second.name == "incident-2"  # two in the same second
    assert second.put("a", b"y" * 40) and not second.put("b", b"z")
    third = made(tmp_path, run_bytes_max=100)
    assert "fill their 100 bytes" in third.missing["folder"] and not third.put("c", b"z")


def test_a_joint_folder_is_written_by_several(tmp_path: Path) -> None:
    for group in ("g0", "g1"):
        incident = folder.Incident(tmp_path, "recovery-e7", "", bytes_max=5)
        assert incident.make(joint=True)
        incident.put(f"recorder-{group}-rank0", b"abc", ".json")
    assert [path.name for path in (tmp_path / "incidents" / "recovery-e7").iterdir()] == ["recorder-g0-rank0.json"]
    assert "do not fit" in incident.missing["recorder-g1-rank0"]


def test_without_a_folder_everything_is_missing(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("in its place")
    incident = folder.Incident(tmp_path, "incident", "why")
    assert not incident.make() and not incident.put("ranks", b"x")
    event = incident.event(0.0)
    assert event.folder == "" and "exists" in event.missing["folder"] and event.missing["ranks"]


def test_the_number_of_incidents_is_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(folder, "INCIDENTS_MAX", 2)
    made(tmp_path), made(tmp_path)
    assert "holds 2 incidents already" in made(tmp_path).missing["folder"]


# ---------------------------------------------------------------- the node


def kmsg(tmp_path: Path, *records: str) -> str:
    """A queue of records, one a read, as /dev/kmsg is."""
    path = tmp_path / "kmsg"
    path.write_text("".join(records))
    return str(path)


def test_the_kernel_is_asked_since_the_start(tmp_path: Path, monkeypatch) -> None:
    records = [
        b"6,1,1000000,-;Out of memory: Killed process 11 (python)",
        b"4,2,3000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.\n SUBSYSTEM=pci\n",
        b"6,3,4000000,-;eth0: link up",
        b"broken",
        b"3,4,5000000,-;Out of memory: Killed process 4711 (python) total-vm:1kB",
    ]
    reads = iter(records)

    def read(descriptor: int, size: int) -> bytes:
        one = next(reads, None)
        if one is None:
            raise BlockingIOError
        if one == b"broken":
            raise BrokenPipeError  # it was overwritten meanwhile
        return one

    monkeypatch.setattr(kernel.os, "read", read)
    lines, why = kernel.kernel_lines(2.0, kmsg(tmp_path))
    assert not why and lines == [
        "[3.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.",
        "[5.000000] Out of memory: Killed process 4711 (python) total-vm:1kB",
    ]


def test_a_kernel_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    assert kernel.kernel_lines(0.0, str(tmp_path / "none")) == ([], f"{tmp_path}/none: No such file or directory")


class Failing(Exception):
    pass


def fake_nvml(**more: Any) -> SimpleNamespace:
    calls = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: f"gpu{index}", "nvmlDeviceGetName": lambda gpu: "H200",
        "nvmlDeviceGetUUID": lambda gpu: "GPU-1", "nvmlDeviceGetTemperature": lambda gpu, kind: 61,
        "nvmlDeviceGetPowerUsage": lambda gpu: 350_500,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=99),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=5, total=10),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 4,
        "nvmlDeviceGetRemappedRows": lambda gpu: (0, 0, 0, 0),
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=4711)],
        "NVML_TEMPERATURE_GPU": 0, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0,
        "NVMLError": Failing,
    }  # fmt: skip

    def no_ecc(*_: Any) -> None:
        raise Failing("Not Supported")

    return SimpleNamespace(**{**calls, "nvmlDeviceGetTotalEccErrors": no_ecc, **more})


def test_gpu_counters_and_what_a_gpu_does_not_have() -> None:
    ((found,), why) = gpu.gpu_counters(fake_nvml())
    assert not why and found["power_w"] == 350.5 and found["pids"] == [4711] and found["ecc_uncorrected"]
    assert found["ecc_uncorrected"] == "Not Supported" and found["throttle_reasons"] == "0x4"

    def no_driver() -> None:
        raise Failing("Driver Not Loaded")

    assert gpu.gpu_counters(fake_nvml(nvmlInit=no_driver)) == ([], "NVML: Driver Not Loaded")


# ---------------------------------------------------------------- stacks


def started(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path), how], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "holds\n"
    return child


@pytest.fixture
def no_spy(monkeypatch) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda program: None)


@pytest.mark.parametrize("how", ["hears", "deaf", "stopped"])
def test_stacks_of_a_process_that_holds_the_interpreter_lock(tmp_path: Path, how: str, no_spy: None) -> None:
    child = started(tmp_path, how)
    try:
        if how == "stopped":
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        asked = stacks.ask(child.pid, 0, tmp_path)
        assert asked is (how == "hears")
        found = asyncio.run(stacks.stacks_of(child.pid, 0, tmp_path, asked, time.monotonic() + 60))
        assert found is not None and child.poll() is None, "asking must not end it"
        if how == "hears":
            assert found.by == "handler" and not found.missing and b"in holds_it_for_ever" in found.text
        else:
            assert found.by == "kernel" and b"task/" in found.text and b"wchan" in found.text
            assert ("stopped" if how == "stopped" else "no handler yet") in found.missing
    finally:
        child.kill()
        child.wait()


def test_a_signal_that_somebody_uses_is_left_to_them(tmp_path: Path) -> None:
    script = "import signal, sys\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
    script += "from lightkeeper.manager.evidence import handler\nsignal.signal(handler.SIGNALS[0], lambda *_: None)\n"
    script += "handler.RankEvidence._hear_signal(SimpleNamespace(_rank=3), Path(sys.argv[1]))\n"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert handler.handler_of(tmp_path, 3) == (handler.SIGNALS[1], handler.stacks_path(tmp_path, 3, handler.SIGNALS[1]))
    assert handler.handler_of(tmp_path, 0) is None


def test_a_process_that_has_ended_has_no_stacks(tmp_path: Path, no_spy: None) -> None:
    child = started(tmp_path, "hears")
    child.kill()
    child.wait()
    assert not stacks.ask(child.pid, 0, tmp_path)
    assert asyncio.run(stacks.stacks_of(child.pid, 0, tmp_path, False, time.monotonic() + 1)) is None


def test_py_spy_goes_first_and_what_it_does_not_do_is_said(tmp_path: Path, monkeypatch) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho 'Thread 1 (idle): \"MainThread\"'\n")
    spy.chmod(0o755)
    monkeypatch.setattr(stacks.shutil, "which", lambda program: str(spy))
    found = asyncio.run(stacks.stacks_of(os.getpid(), 0, tmp_path, False, time.monotonic() + 60))
    assert found == stacks.Stacks("py-spy", b'Thread 1 (idle): "MainThread"\n')
    spy.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    found = asyncio.run(stacks.stacks_of(os.getpid(), 0, tmp_path, False, time.monotonic() + 60))
    assert found is not None and found.by == "kernel" and "py-spy: Error: Permission Denied" in found.missing


# ---------------------------------------------------------------- the logs


def test_the_class_of_the_logs_is_the_first_causes() -> None:
    oom = b"step 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has\n"
    gloo = b"RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7590\n"
    told = log_class({0: gloo, 1: oom})
    (signal_,) = signals._evidence(schema.Evidence(folder="f", group="g1", log_class=told))
    assert "(rank 1): torch.OutOfMemoryError" in told and (signal_.group, signal_.rank) == ("g1", 1)
    assert log_class({0: b"all is well\n"}) == ""


# ---------------------------------------------------------------- in nobody's way


def collector(tmp_path: Path, said: list[str], notes: list[Any], run_folder: str, **more: Any) -> Collector:
    settings = Settings(token="t", run_folder=run_folder, ranks=2, evidence_s=0.2)
    given = {"pids": {}, "views": dict, "exits": lambda: {0: -9, 1: 0}, **more}
    return Collector(settings, tmp_path, note=notes.append, say=said.append, **given)


def test_without_a_run_folder_one_line_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []

    async def run() -> None:
        made = collector(tmp_path, said, [], "")
        done = []
        for _ in range(2):
            made.collect(Collect("killed", "rank 0 was killed", 3))
            made.then(lambda: done.append(1))
        assert done == [1, 1]
        await made.end()

    asyncio.run(run())
    assert len(said) == 1 and "--run-folder" in said[0]


def test_a_kill_is_put_off_by_no_more_than_it_may_be(tmp_path: Path, monkeypatch) -> None:
    borne: list[tuple[float, float]] = []
    said: list[str] = []
    notes: list[Any] = []

    async def run() -> None:
        child = subprocess.Popen(["sleep", "600"])
        monkeypatch.setattr(stacks, "_by_spy", for_ever_until)
        made = collector(tmp_path, said, notes, str(tmp_path), pids={1: child.pid}, exits=lambda: {0: -9})
        killed = asyncio.Event()
        made.collect(Collect("killed", "rank 0 was killed by SIGKILL", 3))
        made.then(lambda: (child.kill(), killed.set()))
        assert not killed.is_set()
        await asyncio.wait_for(killed.wait(), 60)
        assert len(borne) == 1 and time.monotonic() > borne[0][1], "it was put off"
        assert borne[0][0] <= 0.2, "the default would be 2 s"
        await made.end()
        child.wait()

    async def for_ever_until(pid: int, until_s: float) -> str:
        borne.append((until_s - time.monotonic(), until_s))
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        return "py-spy took too long"

    asyncio.run(run())
    (event,) = notes
    assert event.folder.endswith("-g0-step3-killed") and event.reason == "rank 0 was killed by SIGKILL"
    assert (
        event.missing["stacks-rank0"] == "it was killed by SIGKILL" and "took too long" in event.missing["stacks-rank1"]
    )
    assert {"ranks", "kernel-view-rank1"} <= event.taken.keys()
    assert "rank 0 (pid none) was killed by SIGKILL" in (tmp_path / event.folder / "ranks.txt").read_text()


def kept(tmp_path: Path, run_folder: Path) -> tuple[schema.Evidence, str]:
    """What is noted and said of a group whose ranks have ended, with 0.2 s until a kill."""
    said: list[str] = []
    notes: list[Any] = []

    async def run() -> None:
        made = collector(tmp_path, said, notes, str(run_folder))
        made.logs = SimpleNamespace(size=0, tail=lambda rank: b"torch.OutOfMemoryError: CUDA out of memory.\n")  # type: ignore[assignment]
        made.collect(Collect("killed", "rank 0 was killed by SIGKILL", 3))
        await asyncio.wait_for(made.end(), 30)

    asyncio.run(run())
    (event,), (line,) = notes, said
    return event, line


def test_a_busy_machine_costs_no_evidence(tmp_path: Path, monkeypatch) -> None:
    """Neither what is written nor what is thought about it need be done when the ranks are killed."""
    put = folder.Incident.put

    def slow_put(*given: Any, **more: Any) -> bool:
        time.sleep(0.1)
        return put(*given, **more)

    def slow_class(tails: Any) -> str:
        time.sleep(0.4)
        return log_class(tails)

    monkeypatch.setattr(folder.Incident, "put", slow_put)
    monkeypatch.setattr(collector_module, "log_class", slow_class)
    event, line = kept(tmp_path, tmp_path)
    assert event.seconds > 0.6, "more than the 0.2 s that a kill waits, twice"
    assert {"ranks", "log-rank0", "log-rank1"} <= event.taken.keys() and "folder" not in event.missing
    assert event.log_class.startswith("cuda_oom (rank 0)") and line.startswith(f"kept of it: {event.folder} (")


def test_of_a_storage_that_hangs_the_folder_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(collector_module, "WRITE_S_MAX", 0.1)
    monkeypatch.setattr(folder.Incident, "put", lambda *given, **more: time.sleep(600))
    event, line = kept(tmp_path, tmp_path)
    assert event.folder.endswith("-g0-step3-killed") and event.missing["folder"].endswith("not answer within 0.1 s")
    assert event.log_class.startswith("cuda_oom"), "for that no storage is necessary"
    assert line.startswith(f"kept of it: {event.folder}, perhaps not all: the run's folder did not answer within 0.1 s")


def test_logs_that_cannot_be_looked_through_cost_no_evidence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(collector_module, "CLASSIFY_S_MAX", 0.1)
    monkeypatch.setattr(collector_module, "log_class", lambda tails: time.sleep(600))
    event, _ = kept(tmp_path, tmp_path)
    assert event.log_class == "" and "within 0.1 s" in event.missing["log_class"] and event.taken["log-rank0"]


def test_nothing_was_kept_and_the_line_says_why(tmp_path: Path, monkeypatch) -> None:
    event, line = kept(tmp_path, tmp_path / "gone")
    assert event.folder == "" and not event.taken
    assert line.startswith(f"kept of it: nothing: {tmp_path}/gone/incidents: No such file or directory (0 parts, ")
    full = tmp_path / "full"
    full.mkdir()

    def no_space(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "open", no_space, raising=False)
    event, line = kept(tmp_path, full)
    assert line.startswith(f"kept of it: nothing in {event.folder}: No space left on device (0 parts, ")


def test_a_storage_that_hangs_is_not_waited_for() -> None:
    async def run() -> None:
        assert await in_thread(lambda: time.sleep(600), time.monotonic() + 0.05) is None
        assert await in_thread(lambda: 7, time.monotonic() + 60) == 7
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0, time.monotonic() + 60)

    asyncio.run(run())
