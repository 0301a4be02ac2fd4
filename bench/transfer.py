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
            trainers.start("joiner", {}, _join, state_mib, rounds, addresses, orders, answers)
            return trainers.result_of(1, timeout_s=600)["joiner"]
        finally:
            trainers.end()


# ---------------------------------------------------------------- the joiner


def _join(
    state_mib: int, rounds: int, addresses: dict[str, Any], orders: Any, answers: Any
) -> tuple[dict[str, list[float]], list[float]]:
    """One unmeasured round, then the others."""
    import torch

    torch.set_num_threads(1)
    model = _model(state_mib, 0.0)
    kinds: dict[str, Callable[[int], None]] = {
        "ours": lambda i: _fetch_ours(addresses["donor"], model, i),
        "plain": lambda i: _fetch_plain(addresses["plain"], model),
    }
    for chunks in PEER_CHUNKS:
        kinds[f"torchft {chunks}"] = _torchft_fetcher(addresses[f"torchft {chunks}"], chunks)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    snapshot_s = []
    for i in range(rounds + 1):
        orders.put(i)
        snapshot_s.append(answers.get(timeout=_TIMEOUT_S))
        for kind, fetch in kinds.items():
            for parameter in model.parameters():
                parameter.detach().zero_()
            start = time.monotonic()
            fetch(i)
            seconds = time.monotonic() - start
            if kind in ("ours", "plain") and not all(bool((p == 1.0).all()) for p in model.parameters()):
                raise RuntimeError(f"{kind} did not bring the state")
            if i > 0:
                rates[kind].append(state_mib / seconds)
    return rates, snapshot_s[1:]


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
    answers.put(("donor", server.address))
    while True:
        i = orders.get()
        snapshotter.release()
        answers.put(snapshotter.begin(_name(i)).wait(_TIMEOUT_S).seconds)


def _fetch_ours(address: str, model: Any, i: int) -> None:
    from lightkeeper.manager.state.registry import StateRegistry
    from lightkeeper.manager.transfer.joiner import Options, fetch_state

    registry = StateRegistry()
    registry.register("model", model)
    fetch_state([address], TOKEN, registry, _name(i), Options(timeout_s=_TIMEOUT_S, connections=CONNECTIONS))


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


def _torchft_fetcher(metadata: str, chunks: int) -> Callable[[int], None]:
    from torchft.checkpointing import HTTPTransport

    transport = HTTPTransport(timeout=timedelta(seconds=_TIMEOUT_S), num_chunks=chunks)

    def fetch(i: int) -> None:
        transport.recv_checkpoint(0, metadata, 1, timedelta(seconds=_TIMEOUT_S))

    return fetch
