"""Each check of a node: what it takes for sound, what it fails, what it cannot see. Fakes stand for hardware."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from preflight_fakes import FakeNvml, port, tree

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.preflight import check, compare, nvml
from lightkeeper.supervisor.preflight.checks import (
    bandwidth_pairs,
    checkpoint,
    clock,
    cpu_throttle,
    data,
    disk,
    gpu_memory,
    gpu_processes,
    gpu_throttle,
    gpus,
    infiniband,
    limits,
    links,
    matmul,
    matmul_gpu,
    memory,
    names,
    nvlink,
    ports,
    storage,
    versions,
    xid,
)  # fmt: skip
from lightkeeper.supervisor.preflight.expected import FACTS, read_expected
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result

HERE = Request()


@pytest.fixture
def fake() -> Iterator[FakeNvml]:
    made = FakeNvml()
    yield made
    assert made.open == 0, "nvmlShutdown is missing"


def said(result: Result, state: str, *pieces: str) -> Result:
    assert result.state == state, result
    for piece in pieces:
        assert piece in result.reason, result
    result.to_json()
    return result


# --- GPUs ---------------------------------------------------------------------------------------------------


def test_gpus(fake: FakeNvml) -> None:
    said(gpus.look(HERE, {}, fake), "ok", "2 x NVIDIA H200")
    said(gpus.look(Request(gpus=2, gpu_name="H200"), {}, fake), "ok")
    said(gpus.look(Request(gpus=8), {}, fake), "failed", "8 GPUs expected, 2 found")
    said(gpus.look(Request(gpu_name="B200"), {}, fake), "failed", "'B200' is expected, found NVIDIA H200")
    fake.gpus[1]["name"] = "NVIDIA H100"
    said(gpus.look(HERE, {}, fake), "failed", "several kinds")
    fake.gpus.clear()
    said(gpus.look(HERE, {}, fake), "skipped", "none is expected")
    said(gpus.look(Request(gpus=0), {}, fake), "ok", "none, as expected")
    said(gpus.look(Request(gpus=1), {}, fake), "failed", "1 GPU expected, 0 found")
    said(gpus.look(Request(gpu_name="H200"), {}, fake), "failed", "none is found")


def test_gpu_processes(fake: FakeNvml) -> None:
    said(gpu_processes.look(HERE, {}, fake), "ok")
    fake.gpus[1]["pids"] = [os.getpid()]
    said(gpu_processes.look(HERE, {}, fake), "failed", "GPU 1 is used by process", str(os.getpid()))
    fake.gpus[1] |= {"pids": [], "used": 30 << 30}
    said(gpu_processes.look(HERE, {}, fake), "failed", "GPU 1: 30.0 GiB in use by a process that cannot be seen")


@pytest.mark.parametrize(
    ("change", "piece"),
    [
        ({"ecc": 3}, "GPU 0: 3 uncorrected ECC errors"),
        ({"rows": (0, 1, 1, 0)}, "waits to be remapped"),
        ({"rows": (0, 8, 0, 1)}, "could not be remapped"),
    ],
)
def test_gpu_memory(fake: FakeNvml, change: dict[str, Any], piece: str) -> None:
    fake.gpus[1]["rows"] = (2, 5, 0, 0)
    said(gpu_memory.look(HERE, {}, fake), "ok", "5 rows remapped")
    fake.gpus[0] |= change
    said(gpu_memory.look(HERE, {}, fake), "failed", piece)


def test_gpus_that_do_not_count_errors(fake: FakeNvml) -> None:
    for gpu in fake.gpus:
        gpu |= {"ecc": None, "rows": None}
    said(gpu_memory.look(HERE, {}, fake), "skipped")


def test_nvlink(fake: FakeNvml) -> None:
    fake.gpus[0]["link_errors"][(1, fake.NVML_NVLINK_ERROR_DL_REPLAY)] = 4
    said(nvlink.look(HERE, {}, fake), "ok", "2 links up on each of 2 GPUs, 4 replays")
    fake.gpus[0]["link_errors"][(1, fake.NVML_NVLINK_ERROR_DL_RECOVERY)] = 2
    said(nvlink.look(HERE, {}, fake), "failed", "GPU 0: link 1 has recovered 2 times")
    fake.gpus[0]["link_errors"].clear()
    fake.gpus[1]["links"] = {0: True, 1: False}
    said(nvlink.look(HERE, {}, fake), "failed", "GPU 1: 1 of 2 links are up")
    for gpu in fake.gpus:
        gpu["links"] = {}
    said(nvlink.look(HERE, {}, fake), "skipped")


@pytest.mark.parametrize("bit", nvml.BAD_REASONS)
def test_gpu_throttle(fake: FakeNvml, bit: int) -> None:
    fake.gpus[0]["reasons"] = 0x05  # idle, and at the limit of power
    said(gpu_throttle.look(HERE, {}, fake), "ok")
    fake.gpus[1]["reasons"] = bit
    said(gpu_throttle.look(HERE, {}, fake), "failed", "GPU 1", nvml.BAD_REASONS[bit])


def test_a_check_that_needs_a_gpu_is_skipped_without_one(fake: FakeNvml) -> None:
    assert check.unmet((check.GPU,), HERE, fake) == ""
    fake.gpus.clear()
    assert check.unmet((check.GPU,), HERE, fake) == "no GPU: NVML counts none"
    assert "no other nodes" in check.unmet((check.PEERS,), HERE)


def test_xid(tmp_path: Path) -> None:
    head = "[1.0] NVRM: "
    of_hardware = [
        head + "Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        head + "Xid (PCI:0000:3b:00): 48, pid=1, An uncorrectable double bit error",
        "[2.0] nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 28 LTSSM Fault Up",
    ]
    others = [
        head + "Xid (PCI:0000:3b:00): 31, pid=77, MMU Fault",
        "[2.0] nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 3 egress",
        "[3.0] Out of memory: Killed process 4711",
    ]
    assert xid.sort_lines(of_hardware + others) == (of_hardware, others[:1])
    log = tmp_path / "kmsg"
    log.write_text("6,1,9000000000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    said(xid.look(HERE, {}, str(log)), "failed", "1 in the last 3600 s", "fallen off the bus")
    log.write_text("6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    driver = tmp_path / "version"
    said(xid.look(Request(xid_s=0), {}, str(log), str(driver)), "skipped", "no NVIDIA driver")
    driver.touch()
    said(xid.look(Request(xid_s=0), {}, str(log), str(driver)), "ok", "none of hardware")
    said(xid.look(HERE, {}, str(tmp_path / "nothing")), "skipped", "No such file")


# --- processors, memory, limits -----------------------------------------------------------------------------


def test_matmul() -> None:
    left, right = matmul.factors(matmul.SIZE)
    exact = left.astype(np.int64) @ right.astype(np.int64)
    assert np.abs(exact).max() < 2**24 and matmul.digest(exact) == matmul.KNOWN
    exact[100, 3] += 1
    assert matmul.digest(exact) != matmul.KNOWN


def test_a_wrong_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said(matmul.look(HERE, {}), "ok", "exact on")
    right = matmul.digest
    last = max(os.sched_getaffinity(0))
    monkeypatch.setattr(matmul, "digest", lambda one: right(one + (os.sched_getaffinity(0) == {last})))
    allowed = os.sched_getaffinity(0)
    said(matmul.look(HERE, {}), "failed", f"wrong product on CPU {last}")
    assert os.sched_getaffinity(0) == allowed


def test_matmul_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's own CPU: the products are exact there in all formats, and one that is not is told."""
    import torch

    assert matmul_gpu.wrong_products([torch.device("cpu")], 32) == []
    right = matmul.factors

    def broken(size: int) -> tuple[Any, Any]:
        monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.matmul(a, b) + 1)
        return right(size)

    monkeypatch.setattr(matmul_gpu, "factors", broken)
    assert len(matmul_gpu.wrong_products([torch.device("cpu")], 16)) == len(matmul_gpu.FORMATS)


def test_cpu_throttle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said(cpu_throttle.look(HERE, {}, tmp_path, 0), "skipped", "virtual machine")
    heat = "cpu3__thermal_throttle__core_throttle_count"
    tree(tmp_path, **{heat: 12, "cpu3__cpufreq__cpuinfo_max_freq": 4000, "cpu3__cpufreq__scaling_max_freq": 4000})
    said(cpu_throttle.look(HERE, {}, tmp_path, 0), "ok", "12 times")
    monkeypatch.setattr(cpu_throttle.time, "sleep", lambda s: tree(tmp_path, **{heat: 13}))
    said(cpu_throttle.look(HERE, {}, tmp_path), "failed", "cpu3 core")
    monkeypatch.undo()
    tree(tmp_path, cpu3__cpufreq__scaling_max_freq=1000)
    said(cpu_throttle.look(HERE, {}, tmp_path, 0), "failed", "cpu3 at 25 % of its clock")


def test_memory(tmp_path: Path) -> None:
    said(memory.look(HERE, {}, tmp_path), "ok", "--memory-gib says how much")
    said(memory.look(Request(memory_gib=1e6), {}, tmp_path), "failed", "1e+06 needed")
    tree(tmp_path, memory__memory__limit_in_bytes=0)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert memory.cgroup_free(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 20}\n")
    assert memory.cgroup_free(tmp_path) == 2 << 20
    said(memory.look(Request(memory_gib=0.01), {}, tmp_path), "failed", "of what the container may use")


def test_limits(tmp_path: Path) -> None:
    said(limits.look(HERE, {}, str(tmp_path), tmp_path), "ok", "open files")
    said(limits.look(Request(open_files=1 << 29), {}, str(tmp_path), tmp_path), "failed", "ulimit -n")
    said(limits.look(Request(shm_gib=1e8), {}, str(tmp_path), tmp_path), "failed", "--shm-size")
    said(limits.look(HERE, {}, str(tmp_path / "none"), tmp_path), "failed", "No such file")


def test_locked_memory_matters_where_there_is_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (8 << 20, 8 << 20))
    said(limits.look(HERE, {}, str(tmp_path), tmp_path), "ok")
    port(tmp_path, "mlx5_0")
    said(limits.look(HERE, {}, str(tmp_path), tmp_path), "failed", "ulimit -l unlimited")


# --- networks -----------------------------------------------------------------------------------------------


def test_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, none = tmp_path / "net", tmp_path / "none"
    said(links.look(HERE, {}, net, none, 0), "skipped", "no interface")
    tree(net, lo__operstate="unknown", eth0__operstate="up", eth0__speed=100_000, eth0__statistics__rx_errors=9)
    tree(net, eth1__operstate="down", eth1__speed=-1)
    said(links.look(HERE, {}, net, none, 0), "ok", "1 interface up: eth0 100 Gbit/s")
    said(links.look(Request(links={"eth0": 100}), {}, net, none, 0), "ok")
    said(links.look(Request(links={"eth0": 200}), {}, net, none, 0), "failed", "eth0 runs at 100 Gbit/s, 200 expected")
    said(links.look(Request(links={"eth1": 0}), {}, net, none, 0), "failed", "eth1 is down")
    said(links.look(Request(links={"eth7": 0}), {}, net, none, 0), "failed", "eth7: there is no such interface")
    said(links.look(Request(links={"mlx5_0": 0}), {}, net, port(tmp_path / "ib", "mlx5_0"), 0), "ok")
    monkeypatch.setattr(links.time, "sleep", lambda s: tree(net, eth0__statistics__rx_errors=12))
    said(links.look(HERE, {}, net, none), "failed", "eth0: 3 rx_errors within 1 s")


def test_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said(infiniband.look(HERE, {}, tmp_path, 0), "skipped", "no InfiniBand device")
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", state="1: DOWN", phys_state="3: Disabled", rate="10 Gb/sec (4X SDR)")
    said(infiniband.look(HERE, {}, tmp_path, 0), "ok", "1 port active: mlx5_0/1 400 Gbit/s")
    said(infiniband.look(Request(links={"mlx5_0": 800}), {}, tmp_path, 0), "failed", "runs at 400 Gbit/s, 800 expected")
    said(infiniband.look(Request(links={"mlx5_1": 0}), {}, tmp_path, 0), "failed", "mlx5_1/1 is DOWN (Disabled)")
    monkeypatch.setattr(infiniband.time, "sleep", lambda s: port(tmp_path, "mlx5_0", counters__symbol_error=8))
    said(infiniband.look(HERE, {}, tmp_path), "failed", "mlx5_0/1: 1 symbol_error within 1 s")
    monkeypatch.undo()
    port(tmp_path, "mlx5_0", state="2: INIT")
    said(infiniband.look(HERE, {}, tmp_path, 0), "failed", "mlx5_0/1 is INIT (LinkUp)")


def test_ports() -> None:
    said(ports.look(HERE, {}), "skipped")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        said(ports.look(Request(ports=(number,)), {}), "failed", f"port {number}: Address already in use")
    said(ports.look(Request(ports=(number,)), {}), "ok")


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"own": "127.0.1.1", "here": "127.0.0.1", "far": "10.1.2.3"}

    def resolve(host: str, *rest: Any, **more: Any) -> list[Any]:
        if host not in known and not host[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(2, 1, 6, "", (known.get(host, host), 0))]

    monkeypatch.setattr(names.socket, "gethostname", lambda: "own")
    monkeypatch.setattr(names.socket, "getaddrinfo", resolve)
    said(names.look(Request(hosts=("far",)), {}), "ok", "own is 127.0.1.1, far is 10.1.2.3")
    said(names.look(Request(hosts=("typo",)), {}), "failed", "typo is not known")
    said(names.look(Request(nnodes=2, rendezvous="here:1"), {}), "ok")
    said(names.look(Request(nnodes=2, rendezvous="far:1"), {}), "failed", "at which no other node reaches it")


# --- storage ------------------------------------------------------------------------------------------------


def test_disk(tmp_path: Path) -> None:
    said(disk.look(HERE, {}), "skipped")
    said(disk.look(Request(disks={str(tmp_path): 0.001}), {}), "ok", "GiB free")
    said(disk.look(Request(disks={str(tmp_path): 1e8}), {}), "failed", "1e+08 needed")
    said(disk.look(Request(disks={str(tmp_path / "none"): 0}), {}), "failed", "No such file")
    said(disk.look(Request(checkpoint=str(tmp_path)), {}), "ok", str(tmp_path))


def test_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said(checkpoint.look(HERE, {}), "skipped")
    folder = tmp_path / "new" / "folder"
    said(checkpoint.look(Request(checkpoint=str(folder)), {}), "ok")
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch()
    said(checkpoint.look(Request(checkpoint=str(tmp_path / "file")), {}), "failed", "cannot make the folder")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    said(checkpoint.look(Request(checkpoint=str(folder)), {}), "failed", "cannot sync: No space left on device")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"other")
    said(checkpoint.look(Request(checkpoint=str(folder)), {}), "failed", "not what was written")
    assert list(folder.iterdir()) == []


def test_data(tmp_path: Path) -> None:
    said(data.look(HERE, {}), "skipped")
    (tmp_path / "a" / "b").mkdir(parents=True)
    said(data.look(Request(data=(str(tmp_path),)), {}), "failed", "there is no file in it")
    (tmp_path / "a" / "b" / "shard").write_text("text")
    said(data.look(Request(data=(str(tmp_path),)), {}), "ok", "shard: read")
    (tmp_path / "a" / "empty").touch()
    said(data.look(Request(data=(str(tmp_path),)), {}), "failed", "empty is empty")
    said(data.look(Request(data=(str(tmp_path / "none"),)), {}), "failed", "No such file")


def test_storage_alone_is_judged_by_its_own_floors(tmp_path: Path) -> None:
    request = Request(checkpoint=str(tmp_path), storage_mib=1)
    found = said(storage.look(request, {}), "ok", "no floor: not judged")
    assert set(found.figures) == {"storage_write_alone_gbps", "storage_read_alone_gbps"}
    assert list(tmp_path.iterdir()) == []
    high = Request(checkpoint=str(tmp_path), storage_mib=1, floors={"storage_read_alone_gbps": 1e9})
    said(storage.look(high, {}), "failed", "storage_read_alone_gbps", "is below its floor 1e+09")


# --- facts and others ---------------------------------------------------------------------------------------


def test_versions(fake: FakeNvml, tmp_path: Path) -> None:
    facts = versions.facts(fake, port(tmp_path, "mlx5_0"))
    assert set(facts) == set(FACTS)
    assert facts["gpus"] == ["NVIDIA H200"] * 2 and facts["driver"] == "570.86.15" and facts["driver_cuda"] == "12.8"
    assert facts["infiniband"] == {"mlx5_0/1": ["ACTIVE", 400.0]}
    said(versions.look(Request(expect={"driver": "570.86.15"}), {}, fake), "ok", "as expected in 1 facts")
    found = versions.look(Request(expect={"driver": "550.54"}), {}, fake)
    said(found, "failed", "driver is 570.86.15, expected 550.54")


def test_expected_facts_are_facts_or_a_report(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text('{"torch": "2.13.0"}')
    assert read_expected(str(file)) == {"torch": "2.13.0"}
    file.write_text('{"may_join": true, "results": [{"name": "versions", "evidence": {"driver": "1"}}]}')
    assert read_expected(str(file)) == {"driver": "1"}
    for content, piece in (("{", "not JSON"), ("[1]", "an object"), ('{"dirver": "1"}', "is driver meant")):
        file.write_text(content)
        with pytest.raises(UsageError, match=piece):
            read_expected(str(file))


def test_the_odd_node_is_named() -> None:
    facts = {node: {"torch": "2.13.0", "driver": "570"} for node in range(4)}
    assert compare.odd_ones(facts) == {}
    facts[2] = {"torch": "2.12.0"}
    assert compare.odd_ones(facts) == {
        2: ["driver is none, 3 of 4 nodes have 570", "torch is 2.12.0, 3 of 4 nodes have 2.13.0"]
    }
    two = {0: {"torch": "a"}, 1: {"torch": "b"}}
    assert compare.odd_ones(two) == {1: ["torch is b, no majority; node 0 has a"]}


def test_clocks_are_judged_by_the_middle_one() -> None:
    request = Request(nnodes=3, node_rank=0, rendezvous="h:1")
    said(clock.judged(request, {0: 0.0, 1: 0.01, 2: -0.01}), "ok", "differ by 0.020 s")
    said(clock.judged(request, {0: 0.0, 1: 5.0, 2: 5.01}), "failed", "5.00 s behind the others")
    said(clock.judged(request, {0: 0.0, 1: 0.0, 2: 9.0}, (3,)), "ok", "node 2 is wrong by +9.00 s", "without node 3")
    assert compare.wrong_clocks({0: 0.0, 1: -5.0}, 1) == {1: -5.0}  # of two the lower node's counts
    said(clock.judged(Request(clock_skew_s=10), {0: 0.0, 1: 5.0}), "ok")


def test_pairs_are_judged_by_a_floor_or_by_a_sweep() -> None:
    """That a pair got done is asked in any case."""
    slow = {(0, 1): 10.0, (1, 2): 1.0, (0, 2): 1.0}
    about = {node: Request(nnodes=3, node_rank=node, rendezvous="h:1") for node in range(3)}
    done = bandwidth_pairs.DONE_GBPS
    assert [bandwidth_pairs.judged(about[node], slow, done).state for node in range(3)] == ["ok"] * 3
    assert [bandwidth_pairs.judged(about[node], slow, None).state for node in range(3)] == ["ok", "ok", "failed"]
    said(bandwidth_pairs.judged(about[2], slow, 5.0), "failed", "node 2 is slow with every partner", "1 GB/s with 0")
    said(bandwidth_pairs.judged(about[0], slow, 5.0), "ok", "node 2 is slow with every partner")
    hung = {(0, 1): 10.0, (1, 2): 0.0, (0, 2): 0.0}
    assert [bandwidth_pairs.judged(about[node], hung, done).state for node in range(3)] == ["ok", "ok", "failed"]
    of_0 = bandwidth_pairs.judged(about[0], hung, done, [2], [7])
    assert of_0.evidence["named"] == [2, 7] and of_0.figures == {bandwidth_pairs.FIGURE: 10.0}
