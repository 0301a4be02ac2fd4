"""How fast a state reaches a joiner, beside torchft's HTTP transport and plain sockets into preallocated memory."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightkeeper.bench._trainers import Trainers, say

STATE_MIB = 1024
TENSORS = 32
ROUNDS = 5
CONNECTIONS = 2
PEER_CHUNKS = (0, 8)  # torchft's num_chunks; the better one counts
TARGET_PEER = 1.7
TARGET_PLAIN = 0.75
TOKEN = "bench"
_SLICE_BYTES = 1 << 20
_TIMEOUT_S = 120.0


def run() -> dict[str, Any]:
    """Medians of alternating runs over loopback; donors and joiner are processes of their own."""
    rates, snapshot_s = measure(STATE_MIB, ROUNDS)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    peer = max(medians[f"torchft {chunks}"] for chunks in PEER_CHUNKS)
    ratio, of_plain = medians["ours"] / peer, medians["ours"] / medians["plain"]
    return {
        "bench": "transfer",
        "ours": {
            "mib_per_s": round(medians["ours"]),
            "of_plain_sockets": round(of_plain, 3),
            "snapshot_s": round(statistics.median(snapshot_s), 3),
            "state_mb": STATE_MIB,
            "runs": {name: [round(value) for value in values] for name, values in rates.items()},
        },
        "peer": {"mib_per_s": round(peer), "plain_sockets_mib_per_s": round(medians["plain"])},
        "ratio": ratio,
        "target": {"of_torchft": TARGET_PEER, "of_plain_sockets": TARGET_PLAIN},
        "met": ratio >= TARGET_PEER and of_plain >= TARGET_PLAIN,
    }


def measure(state_mib: int, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """MiB/s by kind, and the seconds of each snapshot."""
    context = multiprocessing.get_context("forkserver")
    orders, answers = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as name:
        trainers = Trainers(Path(name))
        try:
            say(f"transfer: {state_mib} MiB, {rounds} rounds")
            trainers.start("donor", {}, _donor, state_mib, orders, answers)
            trainers.start("plain", {}, _plain_donor, state_mib, answers)
            for chunks in PEER_CHUNKS:
                trainers.start(f"torchft {chunks}", {}, _torchft_donor, state_mib, chunks, answers)
            addresses = dict(answers.get(timeout=_TIMEOUT_S) for _ in range(2 + len(PEER_CHUNKS)))
            return _rounds(trainers, state_mib, rounds, addresses, orders, answers)
        finally:
            trainers.end()


# ---------------------------------------------------------------- the joiner


def _rounds(
    trainers: Trainers, state_mib: int, rounds: int, addresses: dict[str, Any], orders: Any, answers: Any
) -> tuple[dict[str, list[float]], list[float]]:
    """One unmeasured round, then the others; every fetch in a process of its own, as a joiner is one."""
    rates: dict[str, list[float]] = {}
    snapshot_s = []
    for i in range(rounds + 1):
        orders.put(i)
        snapshot_s.append(answers.get(timeout=_TIMEOUT_S))
        for kind, address in addresses.items():
            name = f"{kind} {i}"
            trainers.start(name, {}, _fetch, kind, address, state_mib, i)
            seconds = trainers.result_of(1, timeout_s=_TIMEOUT_S)[name]
            if i > 0:
                rates.setdefault(kind, []).append(state_mib / seconds)
    return rates, snapshot_s[1:]


def _fetch(kind: str, address: Any, state_mib: int, i: int) -> float:
    """Seconds of one fetch; imports and the joiner's own memory, allocated and touched, are there before."""
    import torch

    torch.set_num_threads(1)
    if kind.startswith("torchft"):
        return _fetch_torchft(address, int(kind.split()[1]))
    model = _model(state_mib, 0.0)
    fetch = _prepare_ours(address, model, i) if kind == "ours" else lambda: _fetch_plain(address, model)
    start = time.monotonic()
    fetch()
    seconds = time.monotonic() - start
    if not all(bool((parameter == 1.0).all()) for parameter in model.parameters()):
        raise RuntimeError(f"{kind} did not bring the state")
    return seconds


def _model(state_mib: int, value: float) -> Any:
    import torch
    from torch import nn

    numel = state_mib * (1 << 20) // 4 // TENSORS
    return nn.ParameterList([nn.Parameter(torch.full((numel,), value)) for _ in range(TENSORS)])


def _name(i: int) -> Any:
    from lightkeeper.lighthouse.names import Entry, Epoch, Term

    return Entry(Epoch(1, Term(1, "bench")), i)


# ---------------------------------------------------------------- ours


def _donor(state_mib: int, orders: Any, answers: Any) -> None:
    """A snapshot of its own for every round, so that no checksum is left over from the last one."""
    import torch

    from lightkeeper.manager.state.registry import StateRegistry
    from lightkeeper.manager.state.snapshot import Snapshotter
    from lightkeeper.manager.transfer.provider import HealProvider
    from lightkeeper.manager.transfer.server import TransferServer

    torch.set_num_threads(1)
    registry = StateRegistry()
    registry.register("model", _model(state_mib, 1.0))
    snapshotter = Snapshotter(registry)
    snapshotter.prepare()
    server = TransferServer(TOKEN, HealProvider(snapshotter))
    answers.put(("ours", server.address))
    while True:
        i = orders.get()
        snapshotter.release()
        answers.put(snapshotter.begin(_name(i)).wait(_TIMEOUT_S).seconds)


def _prepare_ours(address: str, model: Any, i: int) -> Callable[[], object]:
    from lightkeeper.manager.state.registry import StateRegistry
    from lightkeeper.manager.transfer.joiner import Options, fetch_state

    registry = StateRegistry()
    registry.register("model", model)
    options = Options(timeout_s=_TIMEOUT_S, connections=CONNECTIONS)
    return lambda: fetch_state([address], TOKEN, registry, _name(i), options)


# ---------------------------------------------------------------- plain sockets


def _plain_donor(state_mib: int, answers: Any) -> None:
    views = _views(_model(state_mib, 1.0))
    listener = socket.create_server(("127.0.0.1", 0))
    answers.put(("plain", listener.getsockname()))

    def serve(connection: socket.socket) -> None:
        with connection:
            first = int(connection.recv(16))
            for view in views[first::CONNECTIONS]:
                connection.sendall(view)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def _fetch_plain(address: Any, model: Any) -> None:
    views = _views(model)

    def fetch(first: int) -> None:
        with socket.create_connection(address) as connection:
            connection.sendall(b"%16d" % first)
            for view in views[first::CONNECTIONS]:
                at = 0
                while at < view.nbytes:
                    at += connection.recv_into(view[at : at + _SLICE_BYTES])

    threads = [threading.Thread(target=fetch, args=(i,)) for i in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _views(model: Any) -> list[memoryview]:
    return [memoryview(parameter.detach().numpy()).cast("B") for parameter in model.parameters()]


# ---------------------------------------------------------------- the peer


def _torchft_donor(state_mib: int, chunks: int, answers: Any) -> None:
    from torchft.checkpointing import HTTPTransport

    transport = HTTPTransport(timeout=timedelta(seconds=_TIMEOUT_S), num_chunks=chunks)
    state = {f"w{i}": p.detach() for i, p in enumerate(_model(state_mib, 1.0))}
    transport.send_checkpoint([1], 1, state, timedelta(seconds=_TIMEOUT_S))
    answers.put((f"torchft {chunks}", transport.metadata().replace(socket.gethostname(), "localhost")))
    threading.Event().wait()


def _fetch_torchft(metadata: str, chunks: int) -> float:
    from torchft.checkpointing import HTTPTransport

    transport = HTTPTransport(timeout=timedelta(seconds=_TIMEOUT_S), num_chunks=chunks)
    start = time.monotonic()
    transport.recv_checkpoint(0, metadata, 1, timedelta(seconds=_TIMEOUT_S))
    return time.monotonic() - start
