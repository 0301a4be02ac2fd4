"""Simulated nodes of a large group: they speak the real protocol to a real manager, and their ranks vote by script.

One process holds them all, so that what is measured is the manager. Beside them, ranks that each call a bare server.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

from lightkeeper.wire import CHANNEL_OPTIONS, SERVER_OPTIONS, metadata  # isort: skip - it turns grpc's fork handlers off

import grpc
import grpc.aio

from lightkeeper.manager import local, nodewire
from lightkeeper.manager.agent import BEAT_S, BEATS_PER_S_MAX
from lightkeeper.manager.answers import RankView
from lightkeeper.manager.findmanager import ManagerFinder
from lightkeeper.manager.folding import Said, fold_views
from lightkeeper.manager.settings import Settings
from lightkeeper.protos import manager_pb2, manager_pb2_grpc

START_S_MAX = 30.0
TOTAL = 8
VOTE = "/lightkeeper.bench.Naive/Vote"


class Nodes:
    """All nodes of a group; node 0's ranks speak on the manager's own socket.

    Args:
        settings: the group's.
        path: the manager's local socket.
        pid: the ranks' pid, as far as the manager sees: it watches for its end.
    """

    def __init__(self, settings: Settings, path: Path, pid: int) -> None:
        self.settings, self.path, self.pid = settings, path, pid
        self.step = 0
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._stepped = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Nodes:
        s, until = self.settings, time.monotonic() + START_S_MAX
        finder = ManagerFinder(s)
        while not self.path.exists() or (address := await finder.find()) is None:
            if time.monotonic() > until:
                raise RuntimeError(f"no manager within {START_S_MAX:.0f} s: {finder.why}")
            await asyncio.sleep(0.05)
        for rank in range(s.ranks_per_node):
            self._tasks.append(asyncio.create_task(self._local_rank(rank)))
        for node in range(1, s.nnodes):
            self._tasks.append(asyncio.create_task(self._agent(node, address)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(self, step: int, step_s_max: float) -> None:
        """Returns once all ranks of node 0 have been told that the step before this one is committed."""
        while self.step < step:
            waiting = asyncio.create_task(self._next_step())
            done, _ = await asyncio.wait(
                {waiting, *self._tasks}, timeout=step_s_max, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            if not done:
                raise RuntimeError(f"step {self.step} did not come within {step_s_max:.0f} s")

    async def _next_step(self) -> None:
        async with self._stepped:
            await self._stepped.wait()

    def pause(self) -> None:
        """All ranks compute, and do not vote, from now on."""
        self._goes_on.clear()

    # ------------------------------------------------------------ one rank, and one node

    def _register(self, rank: int) -> local.Register:
        return local.Register(
            token=self.settings.token, rank=rank, pid=self.pid, transfer=f"10.0.{rank >> 8}.{rank & 255}:1", progress=""
        )

    async def _local_rank(self, rank: int) -> None:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(local.frame(self._register(rank)))
        writer.write(local.frame(local.Ready(signature={}, total=TOTAL)))
        script = Script()
        while True:
            (size,) = local.HEADER.unpack(await reader.readexactly(local.HEADER.size))
            vote = script.after(local.to_rank.decode(await reader.readexactly(size)))
            if vote is None:
                continue
            if rank == 0 and vote.step > self.step:
                self.step = vote.step
                async with self._stepped:
                    self._stepped.notify_all()
            await self._goes_on.wait()
            writer.write(local.frame(vote))

    async def _agent(self, node: int, address: str) -> None:
        s = self.settings
        ranks = tuple(range(node * s.ranks_per_node, (node + 1) * s.ranks_per_node))
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub: Any = manager_pb2_grpc.ManagerStub(channel)
            call = stub.Node(metadata=metadata(s.token, s.job))
            hello = manager_pb2.NodeHello(
                group=s.group, node_rank=node, nodes=s.nnodes, ranks=s.ranks, host="bench", pid=node
            )
            await call.write(manager_pb2.FromNode(hello=hello))
            assert (await call.read()).WhichOneof("message") == "taken"
            outbox: asyncio.Queue[Any] = asyncio.Queue()  # one write at a time
            for rank in ranks:
                _say(outbox, (rank,), self._register(rank))
            _say(outbox, ranks, local.Ready(signature={}, total=TOTAL))
            others = [asyncio.create_task(_write(call, outbox)), asyncio.create_task(self._beats(outbox, ranks))]
            try:
                await self._serve(call, outbox, ranks)
            finally:
                for task in others:
                    task.cancel()

    async def _serve(self, call: Any, outbox: asyncio.Queue[Any], ranks: tuple[int, ...]) -> None:
        script, answered = Script(), set[int]()
        while (envelope := await call.read()) is not grpc.aio.EOF:
            if envelope.WhichOneof("message") != "said":
                continue
            for said in nodewire.said_to_ranks(envelope.said):
                if not isinstance(said.message, local.Answer):
                    continue
                answered |= set(said.ranks)
                if len(answered) == len(ranks):
                    answered.clear()
                    vote = script.after(said.message)
                    assert vote is not None
                    await self._goes_on.wait()
                    _say(outbox, ranks, vote)
        raise RuntimeError("the manager hung up on a node")

    async def _beats(self, outbox: asyncio.Queue[Any], ranks: tuple[int, ...]) -> None:
        while True:
            views = fold_views({rank: RankView("compute", self.step, 0.0, 0.0) for rank in ranks})
            beat = manager_pb2.NodeBeat(views=nodewire.views_to_wire(views))
            outbox.put_nowait(manager_pb2.FromNode(beat=beat))
            await asyncio.sleep(max(BEAT_S, self.settings.nnodes / BEATS_PER_S_MAX))


def _say(outbox: asyncio.Queue[Any], ranks: tuple[int, ...], message: local.FromRank) -> None:
    outbox.put_nowait(manager_pb2.FromNode(said=nodewire.said_to_wire([Said(ranks, message)])))


async def _write(call: Any, outbox: asyncio.Queue[Any]) -> None:
    while True:
        await call.write(await outbox.get())


class Script:
    """What a rank says next: it is ready, and then votes step after step."""

    def __init__(self) -> None:
        self._epoch = self._step = 0

    def after(self, heard: local.ToRank) -> local.Vote | None:
        """The vote that follows on an answer; None after anything else."""
        if not isinstance(heard, local.Answer):
            return None
        if heard.verdict == "recover":
            assert heard.plan is not None
            self._epoch, self._step = heard.plan.epoch, heard.plan.step
        else:
            assert heard.verdict == "go", heard
            self._step = heard.step
        return local.Vote(epoch=self._epoch, step=self._step, outcome="reduced", next_total=TOTAL)


# ---------------------------------------------------------------- a call for each rank


class NaiveRanks:
    """Ranks that each call a bare server once a step.

    Args:
        port: the server's, on the loopback.
        ranks: their number.
        per_node: how many share a connection.
    """

    def __init__(self, port: int, ranks: int, per_node: int) -> None:
        self._port, self._ranks, self._per_node = port, ranks, per_node

    async def __aenter__(self) -> NaiveRanks:
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self._channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options=options)
            for _ in range(self._ranks // self._per_node)
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def steps(self, count: int) -> None:
        """So many steps of all ranks."""
        vote = local.body(local.Vote(epoch=1, step=1, outcome="reduced", next_total=TOTAL))
        calls: list[Any] = [channel.unary_unary(VOTE) for channel in self._channels]
        for _ in range(count):
            await asyncio.gather(*(call(vote) for call in calls for _ in range(self._per_node)))


async def serve_naive(ranks: int) -> None:
    """Answers all ranks once all of them have called; prints its port."""
    waiting: list[asyncio.Future[bytes]] = []
    steps = itertools.count()

    async def vote(request: bytes, context: Any) -> bytes:
        local.from_rank.decode(request)
        mine: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        if len(waiting) == ranks:
            answer = local.body(local.Answer(verdict="go", epoch=1, step=next(steps), share=tuple(range(TOTAL))))
            for one in waiting:
                one.set_result(answer)
            waiting.clear()
        return await mine

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(vote)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve_naive(int(sys.argv[1])))
