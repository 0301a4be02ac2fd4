"""The floor of a rejoin on this machine: plain trainers over gloo, and a third process that only does what it must.

No protocol, no checks, no waiting for each other: the two that stay copy their half of the state and of five entries,
and send it; the third makes its memory, takes the state in and applies the entries. What they lose is what the
processors and the memory of the machine cost, whatever runs on them.
"""

from __future__ import annotations

import queue
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lightkeeper.bench._trainers import Trainers

STEPS = 16
RETURNS_AT = 5  # step after which the third process starts
ENTRIES = 5
BUCKET_BYTES = 16 << 20
_RUN_S_MAX = 150.0


def rejoin_stall_s(state_mb: int, step_s: float) -> dict[str, float]:
    """The longest iteration of the two that stay from the return on, less their median before it, in seconds.

    Args:
        state_mb: Parameters and both moments of AdamW, in MB.
        step_s: Timed compute of a step.
    """
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as listener:
        trainers = Trainers(Path(name))
        port = listener.getsockname()[1]
        try:
            for rank in (0, 1):
                trainers.start(f"stays {rank}", {}, _stays, rank, state_mb, step_s, port, str(Path(name) / "store"))
            arrived = [listener.accept()[0] for _ in range(2)]  # both have reached the step of the return
            sockets = sorted(arrived, key=lambda connection: connection.recv(1))  # by rank
            trainers.start("returns", {}, _returns, state_mb, sockets)
            results = trainers.result_of(3, _RUN_S_MAX)
        finally:
            trainers.end()
    stalls, normals = [], []
    for rank in (0, 1):
        seconds = results[f"stays {rank}"]
        normals.append(statistics.median(seconds[1 : RETURNS_AT + 1]))
        stalls.append(max(seconds[RETURNS_AT + 1 :]) - normals[-1])
    return {"survivor_stall_s": round(max(stalls), 3), "normal_s": round(max(normals), 3)}


def _stays(rank: int, state_mb: int, step_s: float, port: int, store: str) -> list[float]:
    """Seconds of every iteration."""
    import torch
    import torch.distributed as dist

    from lightkeeper.bench._compute import stack

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = stack(state_mb / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parameters = list(model.parameters())
    gradients = torch.ones(sum(p.numel() for p in parameters))
    parts = gradients.split([p.numel() for p in parameters])
    seconds: list[float] = []
    sending: queue.Queue[list[Any]] = queue.Queue()
    for step in range(STEPS):
        start = time.monotonic()
        time.sleep(step_s)
        for bucket in gradients.split(BUCKET_BYTES // 4):
            dist.all_reduce(bucket)
        gradients.div_(2)
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        seconds.append(time.monotonic() - start)
        if step == RETURNS_AT:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(bytes([rank]))
            sender = threading.Thread(target=_send, args=(connection, sending))
            sender.start()
            sending.put(_half(rank, _state(parameters, optimizer)))
        elif RETURNS_AT < step <= RETURNS_AT + ENTRIES:
            sending.put(_half(rank, list(parts)))
    dist.barrier()
    sender.join()
    return seconds


def _state(parameters: list[Any], optimizer: Any) -> list[Any]:
    moments = (state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    return [tensor.detach() for tensor in (*parameters, *moments)]


def _half(rank: int, tensors: list[Any]) -> list[Any]:
    """Of the layers, which have two tensors each, every other one."""
    return [tensor for i, tensor in enumerate(tensors) if i // 2 % 2 == rank]


def _send(connection: socket.socket, sending: queue.Queue[list[Any]]) -> None:
    """Copies the state and the entries into memory of their own and sends them, beside the training."""
    for _ in range(1 + ENTRIES):
        for copy in [tensor.clone() for tensor in sending.get()]:
            connection.sendall(memoryview(copy.numpy()).cast("B"))


def _returns(state_mb: int, sockets: list[socket.socket]) -> None:
    """Takes the state and the entries in, and applies them."""
    import torch

    from lightkeeper.bench._compute import stack

    torch.set_num_threads(1)
    model = stack(state_mb / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the moments
    _receive(sockets, _state(parameters, optimizer))
    for _ in range(ENTRIES):
        _receive(sockets, [parameter.grad for parameter in parameters])
        optimizer.step()


def _receive(sockets: list[socket.socket], tensors: list[Any]) -> None:
    def run(rank: int) -> None:
        with sockets[rank].makefile("rb", buffering=0) as stream:
            for tensor in _half(rank, tensors):
                view = memoryview(tensor.numpy()).cast("B")
                while view and (received := stream.readinto(view)):
                    view = view[received:]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
