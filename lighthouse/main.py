"""`lightkeeper lighthouse`: opens the log, serves, and ends in order."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from lightkeeper.errors import UsageError
from lightkeeper.events.schema import ProcessStarted
from lightkeeper.events.writer import EventLog
from lightkeeper.lighthouse.log import LighthouseLog, LogError
from lightkeeper.lighthouse.machine import Bounds
from lightkeeper.lighthouse.service import LighthouseService, add_to
from lightkeeper.wire import SERVER_OPTIONS, join_address, split_address
from lightkeeper.words import say

COMMAND_CHARS_MAX = 1000


@dataclass(frozen=True)
class Options:
    """What the command line gives.

    Attributes:
        bind: address to listen on; port 0 chooses a free one.
        token: the job's token.
        log: folder of the log; None keeps nothing over a restart.
        run_folder: where its events go; None writes none.
        lease_s: how long a silence is borne when somebody waits, in seconds.
        admit_interval_s: for so long after a planned change nobody else is taken in, in seconds.
    """

    bind: str
    token: str
    log: Path | None = None
    run_folder: Path | None = None
    lease_s: float = 2.0
    admit_interval_s: float = 1.0

    @property
    def bounds(self) -> Bounds:
        """The beat is a tenth of the lease, so that nine may be lost."""
        if not 0.1 <= self.lease_s <= 3600:
            raise UsageError(f"--lease-s {self.lease_s}: give 0.1 to 3600 seconds")
        if not 0 <= self.admit_interval_s <= 3600:
            raise UsageError(f"--admit-interval-s {self.admit_interval_s}: give 0 to 3600 seconds")
        return Bounds(self.lease_s, self.lease_s / 10, self.admit_interval_s)


def run(options: Options) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    bounds = options.bounds
    events = None if options.run_folder is None else EventLog(options.run_folder, "lighthouse")
    try:
        log = LighthouseLog(options.log)
    except LogError as error:
        raise UsageError(str(error)) from error
    try:
        return asyncio.run(_serve(options, bounds, log, events))
    except LogError as error:  # the disk is full, for instance
        print(f"lighthouse: {error}", file=sys.stderr)
        return 1
    finally:
        log.close()


async def _serve(options: Options, bounds: Bounds, log: LighthouseLog, events: EventLog | None) -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for every manager
    host, port = split_address(options.bind)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    try:
        port = server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        await server.stop(grace=None)
        raise UsageError(
            f"cannot listen on {options.bind}: the port is in use or the address is not ours; give another --bind"
        ) from error
    service = LighthouseService(
        log, bounds, options.token, events, lambda line: say(f"lighthouse: {line}", stdout=True)
    )
    add_to(server, service)
    await server.start()
    if events is not None:
        events.write(ProcessStarted(command=" ".join(sys.argv)[:COMMAND_CHARS_MAX]))
    kept = options.log or "nowhere (a restart can only take over with every member's consent)"
    print(
        f"lighthouse: listening on {join_address(host, port)}, term {log.term}, log kept in {kept}",
        flush=True,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ticks = asyncio.create_task(service.run_ticks())
    waiter = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((ticks, waiter, service.failed), return_when=asyncio.FIRST_COMPLETED)
        for ended in (service.failed, ticks):
            if ended.done():
                ended.result()
    finally:
        ticks.cancel()
        await service.end_streams()
        await server.stop(grace=0.2)
    return 0
