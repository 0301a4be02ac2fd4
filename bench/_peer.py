"""The peer: torchft 0.2.0, run the way its documentation says, one rank per replica group over gloo."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

START_S_MAX = 60.0  # it imports torch, on a machine that may be busy
ROUND_S_MAX = 120.0
TIMEOUT_S = 60.0  # its manager's default
CHANNELS = 64


@contextmanager
def lighthouse(minimum: int = 1) -> Iterator[str]:
    """The peer's lighthouse on a free port, with its default time-outs."""
    with lighthouse_process(minimum) as (address, _):
        yield f"http://{address}"


@contextmanager
def lighthouse_process(minimum: int) -> Iterator[tuple[str, int]]:
    """The same; gives its ``host:port`` and its pid. Its quorum needs `minimum` groups."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).parent / "torchft_lighthouse"
    command = [str(program), "--bind", f"127.0.0.1:{port}", "--min_replicas", str(minimum)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S_MAX
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the peer's lighthouse did not start")
            time.sleep(0.05)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def train(
    group: int,
    steps: int,
    compute_s: float,
    gradient_mb: float,
    die_at: int | None = None,
    rows_to: str = "",
    timeout_s: float = TIMEOUT_S,
    members: int = 0,
    freeze_at: tuple[str, int] | None = None,
) -> list[dict[str, Any]]:
    """One group of the peer, with AdamW.

    Args:
        group: its number.
        steps: committed steps after which it ends.
        compute_s: timed compute of a step, in seconds.
        gradient_mb: size of its gradients; the state is three times as large.
        die_at: the step in whose reduce it kills itself.
        rows_to: file that every row is appended to as a line of JSON, once it is there.
        timeout_s: of its manager and of its collectives.
        members: how many groups are at work, the others being spares; 0: all that are there.
        freeze_at: where it stops itself by SIGSTOP, ``compute`` (as the step begins) or ``reduce``, and in which step.

    Returns:
        Of every iteration: its seconds, the step before and after it, the members, whether its gradients counted, and
        when it ended (monotonic); of the last one also the state's digest. When a group killed itself stands in its
        `rows_to`, with the suffix ``.killed``.
    """
    import torch
    from torchft import Optimizer

    import lightkeeper

    _store, model, optimizer, manager = _only_rank(f"g{group}", gradient_mb, timeout_s, members)
    wrapped = Optimizer(manager, optimizer)
    sizes = [p.numel() for p in model.parameters()]
    gradients = torch.zeros(sum(sizes))
    rows: list[dict[str, Any]] = []
    while manager.current_step() < steps:
        start, before = time.monotonic(), manager.current_step()
        _strike("compute", before, die_at, freeze_at, rows_to)
        wrapped.zero_grad()
        time.sleep(compute_s)
        gradients.fill_(1.0)
        work = manager.allreduce(gradients)
        _strike("reduce", before, die_at, freeze_at, rows_to)
        work.wait()
        works = manager.is_participating()
        for parameter, part in zip(model.parameters(), gradients.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        wrapped.step()
        now, after = time.monotonic(), manager.current_step()
        row = {"seconds": now - start, "before": before, "after": after, "at": now}
        rows.append({**row, "members": manager.num_participants(), "works": works})
        _append(rows_to, rows[-1])
    rows[-1]["digest"] = lightkeeper.fingerprint(model, optimizer)
    manager.shutdown(wait=False)
    return rows


def _only_rank(name: str, gradient_mb: float, timeout_s: float, members: int) -> tuple[Any, Any, Any, Any]:
    """What the only rank of a group trains with: the group's store, its model, AdamW and the manager.

    The store is served for as long as it is held.
    """
    import torch
    import torch.distributed as dist

    from lightkeeper.bench._compute import stack

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
    model = stack(gradient_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return store, model, optimizer, _manager(name, model, optimizer, timedelta(seconds=timeout_s), members)


def _strike(where: str, step: int, die_at: int | None, freeze_at: tuple[str, int] | None, rows_to: str) -> None:
    """Kills or stops this process, if it is to be here and now; when it was killed is left beside its rows.

    As a step begins it has not asked for its quorum yet, which is the better case for the others.
    """
    if where == "reduce" and step == die_at:
        if rows_to:
            Path(f"{rows_to}.killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    if freeze_at == (where, step):
        os.kill(os.getpid(), signal.SIGSTOP)


def _append(rows_to: str, row: dict[str, Any]) -> None:
    if rows_to:
        with open(rows_to, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _manager(name: str, model: Any, optimizer: Any, timeout: timedelta, members: int) -> Any:
    from torchft import Manager, ProcessGroupGloo
    from torchft.manager import WorldSizeMode

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    mode = WorldSizeMode.FIXED_WITH_SPARES if members else WorldSizeMode.DYNAMIC
    return Manager(
        pg=ProcessGroupGloo(timeout=timeout), min_replica_size=members or 1, load_state_dict=load_state_dict,
        state_dict=state_dict, replica_id=name, timeout=timeout, hostname="localhost", world_size_mode=mode,
    )  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What `train` has written so far; a line cut short by a kill is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


async def quorum_rounds(address: str, groups: int, rounds: int) -> dict[str, Any]:
    """What its lighthouse takes per step: every group asks for a quorum and waits for the answer.

    Requests are made by hand: a `LighthouseQuorumRequest` has a `QuorumMember` as field 1 with replica_id (1), address
    (2), store_address (3), step (4) and world_size (5).
    """
    import asyncio

    import grpc

    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(min(groups, CHANNELS))]
    calls: Any = [channel.unary_unary("/torchft.LighthouseService/Quorum") for channel in channels]
    seconds, size = [], 0
    for step in range(rounds):
        start = time.perf_counter()
        asking = (calls[g % len(calls)](_quorum_request(g, step), timeout=ROUND_S_MAX) for g in range(groups))
        size = len((await asyncio.gather(*asking))[0])
        seconds.append(time.perf_counter() - start)
    for channel in channels:
        await channel.close()
    return {"round_s": statistics.median(seconds[1:]), "round_bytes": size * groups}


def _quorum_request(group: int, step: int) -> bytes:
    member = _field(1, f"g{group}:0a1b2c3d-aaaa-bbbb-cccc-0123456789ab".encode())
    member += _field(2, f"http://host{group}.cluster.local:29511".encode())
    member += _field(3, f"host{group}.cluster.local:29500".encode())
    member += (b"\x20" + _varint(step) if step else b"") + b"\x28\x08"
    return _field(1, member)


def _field(number: int, raw: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(raw)) + raw


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])
