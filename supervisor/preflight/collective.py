"""The ranks of a node in all-reduces that are timed: `python -m lightkeeper.supervisor.preflight.collective`.

A rank reads orders, one JSON line each, and answers each with a line: how fast, or what was wrong. torch, which takes
seconds to import, is imported once for all ranks and all orders.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from datetime import timedelta
from typing import Any

PROBE_BYTES = 1 << 18
REPEATS = 3
GRACE_S = 3.0  # beyond a group's time-out, for what it does before and after
BUDGET_S = 2.0  # a slow link gets fewer bytes: that it is slow is seen in any case


def bus_bandwidth(size_bytes: float, seconds: float, ranks: int) -> float:
    """Bus bandwidth of an all-reduce, in GB/s (1e9 bytes a second).

    ``algbw * 2 * (n - 1) / n`` with ``algbw = size / time``: what each rank must send and receive at least, so that it
    can be compared with the hardware's figure whatever the number of ranks n
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

    Args:
        size_bytes: of the tensor that each rank has.
        seconds: for one all-reduce.
        ranks: n.
    """
    return size_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


def main() -> None:
    """Imports torch once, then forks a process for each rank: the arguments are its two descriptors, ``IN:OUT``."""
    from lightkeeper.manager.processes import die_with_parent

    die_with_parent()
    parent, *pipes = sys.argv[1:]
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    if os.getppid() != int(parent):
        return
    this = os.getpid()
    for pipe in pipes:
        orders, answers = map(int, pipe.split(":"))
        if os.fork() == 0:
            die_with_parent()
            if os.getppid() == this:
                _obey(orders, answers)
            os._exit(0)
        os.close(answers)  # so that the end of a rank is seen
    for _ in pipes:
        os.wait()


def _obey(orders: int, answers: int) -> None:
    """One rank, until there are no more orders: each is done by a process forked for it.

    A group whose peer hangs cannot be aborted; its process can be killed, and the next order finds nothing left of it.
    """
    from lightkeeper.manager.processes import die_with_parent

    _tell(answers, {"ready": True})
    this = os.getpid()
    with os.fdopen(orders) as lines:
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                die_with_parent()
                if os.getppid() == this:
                    _tell(answers, _done(order) | {"group": order["group"]})
                os._exit(0)
            if why := _why_not(pid, order["timeout_s"] + GRACE_S):
                _tell(answers, {"error": why, "group": order["group"]})


def _done(order: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"gbps": _timed(order)}
    except (RuntimeError, TimeoutError) as error:  # torch's names for what a peer or the network did
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def _why_not(pid: int, within_s: float) -> str:
    """Waits for a rank's process, and ends it after so many seconds; why it has not answered, empty if it has."""
    from lightkeeper.manager.exits import describe_exit

    descriptor = os.pidfd_open(pid)
    late = not select.select([descriptor], [], [], within_s)[0]
    os.close(descriptor)
    if late:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if late:
        return f"it did not get done within {within_s:g} s"
    return f"the rank {describe_exit(code)}" if code else ""


def _tell(answers: int, told: dict[str, Any]) -> None:
    os.write(answers, json.dumps(told).encode() + b"\n")


def _timed(order: dict[str, Any]) -> float:
    import torch

    device = torch.device("cuda", order["local_rank"]) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = _form(order, device)
    probe = torch.zeros(PROBE_BYTES // 4, device=device)
    _seconds(group, probe, 1)
    once = _agreed(group, _seconds(group, probe, 1), device)
    wanted = order["mib"] << 20
    size = max(PROBE_BYTES, min(wanted, int(PROBE_BYTES * BUDGET_S / REPEATS / max(once, 1e-9))))
    tensor = torch.zeros(size // 4, device=device)
    _seconds(group, tensor, 1)
    seconds = _agreed(group, _seconds(group, tensor, REPEATS), device)
    return bus_bandwidth(4 * tensor.numel(), seconds, order["size"])


def _seconds(group: Any, tensor: Any, repeats: int) -> float:
    """Of one all-reduce, after all have come."""
    import torch

    group.allreduce([torch.zeros(1, device=tensor.device)]).wait()
    _synchronize(tensor.device)
    began = time.perf_counter()
    for _ in range(repeats):
        group.allreduce([tensor]).wait()
    _synchronize(tensor.device)
    return (time.perf_counter() - began) / repeats


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(group: Any, seconds: float, device: Any) -> float:
    """The longest that any rank saw, so that all answer alike and choose one size."""
    import torch
    from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.MAX)
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    group.allreduce([value], options).wait()
    return float(value.item())


def _form(order: dict[str, Any], device: Any) -> Any:
    """The process group: NCCL for GPUs, else gloo, at the address by which this node was told to be reached."""
    import torch.distributed as dist

    timeout = timedelta(seconds=order["timeout_s"])
    store: dist.Store
    if order["file"]:
        store = dist.FileStore(order["file"], order["size"])
    else:
        from lightkeeper.manager.store import RendezvousStore
        from lightkeeper.supervisor.preflight.meeting import Place
        from lightkeeper.supervisor.preflight.request import request_from_json

        place = Place(request_from_json(order["request"]), order["group"] + "/")
        store = RendezvousStore(place, order["timeout_s"])
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, order["rank"], order["size"], nccl)
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [ProcessGroupGloo.create_device(hostname=order["address"], lazy_init=False)]
    gloo._timeout = timeout
    return ProcessGroupGloo(store, order["rank"], order["size"], gloo)


if __name__ == "__main__":
    main()
