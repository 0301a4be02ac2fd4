"""What a step asks of the control plane: one vote to the own manager, nothing to the lighthouse."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio

from lightkeeper.bench._trainers import Trainers, say
from lightkeeper.lighthouse.log import LighthouseLog
from lightkeeper.lighthouse.machine import Bounds, JobMachine
from lightkeeper.lighthouse.service import LighthouseService, add_to
from lightkeeper.wire import SERVER_OPTIONS

STEPS = 500
WARM_STEPS = 50
TARGET_S = 0.001
TOKEN = "bench"


def run() -> dict[str, Any]:
    """Median vote of one rank, and the messages that reached the lighthouse while the steps ran."""
    say("vote: one group, tiny steps")
    with tempfile.TemporaryDirectory() as name, CountingLighthouse() as lighthouse:
        folder = Path(name)
        trainers = Trainers(folder)
        environment = {
            "LIGHTKEEPER_GROUP": "g0", "LIGHTKEEPER_LIGHTHOUSE": lighthouse.address, "LIGHTKEEPER_TOKEN": TOKEN,
        }  # fmt: skip
        try:
            trainers.start("g0", environment, train)
            measured = trainers.result_of(1, timeout_s=120)["g0"]
        finally:
            trainers.end()
    heard = dict(sorted(lighthouse.heard.items()))
    beats = heard.get("Beat", 0)
    others = sum(heard.values()) - beats
    vote_s = statistics.median(measured["vote_s"])
    return {
        "bench": "vote",
        "ours": {
            "vote_s": vote_s, "vote_p99_s": statistics.quantiles(measured["vote_s"], n=100)[98],
            "votes_per_step": measured["votes"] / (STEPS + WARM_STEPS + 1), "lighthouse_messages": heard,
            "lighthouse_messages_per_step_without_beats": others / (STEPS + WARM_STEPS),
            "manager_start_s": measured["manager_start_s"],
        },
        "peer": {},
        "ratio": None,
        "target": {"vote_s": TARGET_S, "votes_per_step": 1},
        "met": vote_s <= TARGET_S and measured["votes"] == STEPS + WARM_STEPS + 1 and others <= 5,
    }  # fmt: skip


def train() -> dict[str, Any]:
    """Runs tiny steps and times the calls to the manager."""
    import torch

    import lightkeeper
    from lightkeeper.manager.client import ManagerClient
    from lightkeeper.manager.local import Vote

    torch.set_num_threads(1)
    times: list[float] = []
    call = ManagerClient.call

    def timed(self: ManagerClient, message: Any) -> Any:
        start = time.perf_counter()
        answer = call(self, message)
        if isinstance(message, Vote):
            times.append(time.perf_counter() - start)
        return answer

    ManagerClient.call = timed  # type: ignore[method-assign]
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = time.perf_counter()
    manager = lightkeeper.Manager(model, optimizer)
    manager_start_s = time.perf_counter() - start
    for step in manager.steps(STEPS + WARM_STEPS, 1):
        for _ in step.microbatches():
            model(torch.ones(1, 8)).sum().backward()
            time.sleep(0.002)
        optimizer.step()
    return {"vote_s": times[WARM_STEPS:], "votes": len(times), "manager_start_s": manager_start_s}


class CountingLighthouse:
    """A real lighthouse in a thread, which counts what its machines are told."""

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CountingLighthouse:
        self._thread.start()
        self._listening.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        service = LighthouseService(LighthouseLog(None), Bounds(), TOKEN, None, lambda line: None)
        received = JobMachine.received

        def counting(machine: JobMachine, connection: int, group: str, message: Any, now: float) -> Any:
            self.heard[type(message).__name__] += 1
            return received(machine, connection, group, message, now)

        JobMachine.received = counting  # type: ignore[method-assign, assignment]
        server = grpc.aio.server(options=SERVER_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        add_to(server, service)
        await server.start()
        self.address = f"127.0.0.1:{port}"
        ticks = asyncio.create_task(service.run_ticks())
        self._listening.set()
        await self._stop.wait()
        ticks.cancel()
        await server.stop(0.1)
        JobMachine.received = received  # type: ignore[method-assign]
