"""The peer: torchft 0.2.0, run the way its documentation says, one rank per replica group over gloo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

START_S_MAX = 20.0


@contextmanager
def lighthouse() -> Iterator[str]:
    """The peer's lighthouse on a free port, with its default time-outs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).parent / "torchft_lighthouse"
    command = [str(program), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S_MAX
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the peer's lighthouse did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def train(group: int, steps: int, compute_s: float, gradient_mb: float, die_at: int | None) -> list[dict[str, Any]]:
    """One group: every iteration's duration, step before and after, and members; may kill itself inside a reduce."""
    import torch
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from lightkeeper.bench._compute import stack

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
    model = stack(gradient_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    timeout = timedelta(seconds=30)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), min_replica_size=1, load_state_dict=model.load_state_dict,
        state_dict=model.state_dict, replica_id=f"g{group}", timeout=timeout, hostname="localhost",
    )  # fmt: skip
    wrapped = Optimizer(manager, optimizer)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()))
    rows: list[dict[str, Any]] = []
    while manager.current_step() < steps:
        start, before = time.monotonic(), manager.current_step()
        wrapped.zero_grad()
        time.sleep(compute_s)
        gradients.fill_(1.0)
        work = manager.allreduce(gradients)
        if die_at is not None and before == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
        for parameter, part in zip(
            model.parameters(), gradients.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = part.view_as(parameter).clone()
        wrapped.step()
        rows.append(
            {
                "seconds": time.monotonic() - start,
                "before": before,
                "after": manager.current_step(),
                "members": manager.num_participants(),
            }
        )
    manager.shutdown(wait=False)
    return rows
