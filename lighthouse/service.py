"""The thin `grpc.aio` service around the membership machines: streams in, actions carried out, a tick."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from lightkeeper.events.schema import Unauthorised
from lightkeeper.events.writer import EventLog
from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Activated, Close, Ended, Note, Promised, Rise, Send, Superseded
from lightkeeper.lighthouse.codec import unwrap, wrap
from lightkeeper.lighthouse.log import JobHistory, LighthouseLog
from lightkeeper.lighthouse.machine import Bounds, JobMachine
from lightkeeper.lighthouse.names import Epoch, Membership
from lightkeeper.lighthouse.notes import event
from lightkeeper.lighthouse.rosters import Rosters, UnknownEpoch
from lightkeeper.lighthouse.status import status
from lightkeeper.protos import lighthouse_pb2, lighthouse_pb2_grpc
from lightkeeper.wire import JOB_KEY, authorised
from lightkeeper.words import Seldom

OUTBOX_MAX = 1_000
STREAMS_END_S = 0.5
SHOWN_CHARS_MAX = 300
HELLO_S_MAX = 10.0  # for a stream to begin with it
NAME_CHARS_MAX = 256
MESSAGES_PER_S_MAX = 200.0  # on one stream, for long; a manager sends five, and with the shortest lease a hundred
MESSAGES_AT_ONCE_MAX = 1_000.0
REFUSALS_PER_S_MAX = 20  # of which a line and an event are written
BY_CHARS_MAX = 100
Context = grpc.aio.ServicerContext[Any, Any]


class Stream:
    """One manager's stream: what is still to be sent on it (`None` ends it), and what both its ends know.

    Args:
        known: finds a membership of a job by its epoch.
    """

    def __init__(self, known: Callable[[str, Epoch], Membership | None] = lambda job, epoch: None) -> None:
        self.job = ""
        self.group = ""
        self.begun = False
        self._allowed, self._counted_s = MESSAGES_AT_ONCE_MAX, 0.0
        self.rosters = Rosters(elsewhere=lambda epoch: known(self.job, epoch))
        self.outbox: asyncio.Queue[m.ToManager | None] = asyncio.Queue(OUTBOX_MAX)

    def too_soon_s(self, now: float) -> float:
        """Counts a message; how long to read no further one. What a flood sends waits at its sender (flow control)."""
        earned = (now - self._counted_s) * MESSAGES_PER_S_MAX
        self._allowed, self._counted_s = min(MESSAGES_AT_ONCE_MAX, self._allowed + earned) - 1, now
        return max(0.0, -self._allowed / MESSAGES_PER_S_MAX)

    def put(self, message: m.ToManager | None) -> None:
        """Queues a message; a reader so slow that the outbox is full loses its stream."""
        if self.outbox.full():
            while not self.outbox.empty():
                self.outbox.get_nowait()
            message = None
        self.outbox.put_nowait(message)


class LighthouseService(lighthouse_pb2_grpc.LighthouseServicer):
    """Carries out what the machines decide.

    Args:
        log: the open log; its term is the reign.
        bounds: lease and beat.
        token: the job's token, which every call carries.
        events: a job's event log, by job id.
        say: prints one line for the operator.
    """

    def __init__(
        self,
        log: LighthouseLog,
        bounds: Bounds,
        token: str,
        events: EventLog | None,
        say: Callable[[str], None],
    ) -> None:
        self.log, self.bounds, self.token, self.events, self.say = log, bounds, token, events, say
        self.jobs: dict[str, JobMachine] = {}
        self.streams: dict[int, Stream] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[str, tuple[str, float]] = {}
        self._seldom, self._refusals = Seldom(), Seldom(REFUSALS_PER_S_MAX)
        self._next = 0
        for job, history in log.jobs.items():
            self.jobs[job] = JobMachine(job, log.term, history, bounds, time.monotonic())

    # ------------------------------------------------------------ calls

    async def Session(self, request_iterator: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        """One manager's stream, for the life of its group."""
        await self._authorise(context, "Session")
        self._next += 1
        number, stream = self._next, Stream(self._known)
        self.streams[number] = stream
        reader = asyncio.create_task(self._read(number, stream, request_iterator, context.peer()))
        hurry = asyncio.get_running_loop().call_later(HELLO_S_MAX, self._hurry, stream, context.peer())
        try:
            while (message := await stream.outbox.get()) is not None:
                if isinstance(message, m.Activate):
                    message = message.for_one(stream.group)
                yield wrap(message, stream.rosters)
        finally:
            hurry.cancel()
            reader.cancel()
            self._forget(number)

    async def Status(self, request: Any, context: Context) -> Any:
        """What an operator sees of a job."""
        await self._authorise(context, "Status")
        job = str(dict(context.invocation_metadata() or ()).get(JOB_KEY, ""))
        return status(await self._known_job(job, context), time.monotonic())

    async def FenceGroup(self, request: Any, context: Context) -> Any:
        """The operator's word that the processes of a group are gone, or the question what it would mean."""
        await self._authorise(context, "FenceGroup")
        job = str(dict(context.invocation_metadata() or ()).get(JOB_KEY, ""))
        machine = await self._known_job(job, context)
        by = f"{request.by[:BY_CHARS_MAX] or 'somebody'} ({context.peer()})"
        now = time.monotonic()
        fencing = machine.fencing(request.group, now)
        if not request.check:
            actions, refused = machine.fence(request.group, by, now, request.incarnation)
            if refused:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refused)
            self._carry_out(job, actions)
        return lighthouse_pb2.FenceGroupReply(
            incarnation=fencing.incarnation,
            gone_ms=None if fencing.gone_s is None else round(fencing.gone_s * 1000),
            heard_ms=None if fencing.heard_s is None else round(fencing.heard_s * 1000),
            refused=fencing.refused,
        )

    async def DrainGroup(self, request: Any, context: Context) -> Any:
        """The operator asks a group to leave, or what has become of it."""
        await self._authorise(context, "DrainGroup")
        job = str(dict(context.invocation_metadata() or ()).get(JOB_KEY, ""))
        machine = await self._known_job(job, context)
        if request.check:
            drained = machine.drained(request.group, request.incarnation)
        else:
            by = f"{request.by[:BY_CHARS_MAX] or 'somebody'} ({context.peer()})"
            deadline_s = request.deadline_ms / 1000 if request.deadline_ms else None
            actions, drained = machine.drain(request.group, by, time.monotonic(), deadline_s)
            if drained.refused:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, drained.refused)
            self._carry_out(job, actions)
        return lighthouse_pb2.DrainGroupReply(
            incarnation=drained.incarnation, here=drained.here, left=drained.left, how=drained.how
        )

    async def FindManager(self, request: Any, context: Context) -> Any:
        """Where the agents of a group's nodes find its manager."""
        await self._authorise(context, "FindManager")
        machine = self.jobs.get(str(dict(context.invocation_metadata() or ()).get(JOB_KEY, "")))
        group = None if machine is None else machine.groups.get(request.group)
        if group is None or group.hello is None or not group.in_touch:
            return lighthouse_pb2.FindManagerReply()
        return lighthouse_pb2.FindManagerReply(manager=group.hello.manager, incarnation=group.incarnation)

    async def _known_job(self, job: str, context: Context) -> JobMachine:
        machine = self.jobs.get(job)
        if machine is None:
            known = ", ".join(sorted(self.jobs)) or "none"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no job {job!r} here; jobs: {known}")
        assert machine is not None
        return machine

    async def end_streams(self) -> None:
        """Lets every manager's stream end in good order, before the server breaks it off."""
        for stream in self.streams.values():
            stream.put(None)
        until = time.monotonic() + STREAMS_END_S
        while self.streams and time.monotonic() < until:
            await asyncio.sleep(0.01)

    async def run_ticks(self) -> None:
        """Time passes for the machines, for ever."""
        while True:
            await asyncio.sleep(self.bounds.beat_s / 2)
            for job, machine in self.jobs.items():
                self._carry_out(job, machine.tick(time.monotonic()))
            self._forget_jobs(time.monotonic())

    # ------------------------------------------------------------ streams

    async def _authorise(self, context: Context, what: str) -> None:
        if not authorised(context.invocation_metadata(), self.token):
            if (line := self._seldom.lets(f"refused {context.peer()}: wrong or missing token")) is not None:
                self._write_event(Unauthorised(peer=context.peer(), what=what))
                self.say(line)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")

    async def _read(self, number: int, stream: Stream, requests: AsyncIterator[Any], peer: str) -> None:
        try:
            async for envelope in requests:
                message = self._understand(stream, envelope, peer)
                if message is None:
                    break
                machine = self._machine(stream.job)
                now = time.monotonic()
                self._carry_out(stream.job, machine.received(number, stream.group, message, now))
                if (wait_s := stream.too_soon_s(now)) > 0:
                    await asyncio.sleep(wait_s)
        except grpc.aio.AioRpcError:
            pass  # the stream broke: `finally` tells the machine
        finally:
            self._forget(number)
            stream.put(None)

    def _understand(self, stream: Stream, envelope: Any, peer: str) -> m.ToLighthouse | None:
        """The message in an envelope; None if the stream must end, after the reason was said."""
        if not stream.begun:
            if envelope.WhichOneof("message") not in (None, "hello"):
                self._say_seldom(f"{peer} did not begin with a hello; its stream is closed")
                return None
            hello = envelope.hello
            names = (hello.job, hello.group, hello.incarnation, hello.manager)
            if envelope.HasField("hello") and not all(0 < len(name) <= NAME_CHARS_MAX for name in names):
                self._say_seldom(f"{peer} gave a name that is empty or too long; its stream is closed")
                return None
            stream.job, stream.group = hello.job, hello.group
        try:
            message: m.ToLighthouse = unwrap(envelope, stream.rosters)
        except UnknownEpoch as error:
            stream.put(m.Unknown(error.epoch))
            return None
        except ValueError as error:
            self._say_seldom(f"{peer} sent a malformed message ({error}); its stream is closed")
            return None
        stream.begun = True
        return message

    def _hurry(self, stream: Stream, peer: str) -> None:
        if not stream.begun:
            self._say_seldom(f"{peer} said no hello within {HELLO_S_MAX:.0f} s; its stream is closed")
            stream.put(None)

    def _say_seldom(self, line: str) -> None:
        if (said := self._seldom.lets(line)) is not None:
            self.say(said)

    def _known(self, job: str, epoch: Epoch) -> Membership | None:
        """A membership of this epoch, if a job's machine holds it."""
        machine = self.jobs.get(job)
        held = () if machine is None else (machine.newest, *machine.prepared)
        return next((one for one in held if one is not None and one.epoch == epoch), None)

    def _machine(self, job: str) -> JobMachine:
        machine = self.jobs.get(job)
        if machine is None:
            machine = self.jobs[job] = JobMachine(job, self.log.term, JobHistory(), self.bounds, time.monotonic())
        return machine

    def _forget(self, number: int) -> None:
        stream = self.streams.pop(number, None)
        if stream is not None and stream.begun:
            machine = self._machine(stream.job)
            self._carry_out(stream.job, machine.disconnected(number, time.monotonic()))

    def _forget_jobs(self, now: float) -> None:
        """Where nobody is and nothing was ever promised there was no job."""
        for job in [job for job, it in self.jobs.items() if job not in self.log.jobs and it.is_nothing(now)]:
            del self.jobs[job]
            self._waiting.pop(job, None)

    # ------------------------------------------------------------ actions

    def _carry_out(self, job: str, actions: list[Action]) -> None:
        """Carries actions out; the first that cannot be is the end of this lighthouse, and nothing follows it."""
        if self.failed.done():
            return
        try:
            self._do(job, actions)
        except Exception as error:
            self.failed.set_exception(error)

    def _do(self, job: str, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if (stream := self.streams.get(action.connection)) is not None:
                    stream.put(action.message)
            elif isinstance(action, Close):
                if (stream := self.streams.get(action.connection)) is not None:
                    stream.put(None)
            elif isinstance(action, Note):
                if action.kind == "refused" and self._refusals.lets("") is None:
                    continue  # who is refused for now comes again several times a second
                self._write_event(event(action), job)
                self._say_note(job, action)
            elif isinstance(action, Rise):
                self.log.rise(action.term.number)
                for machine in self.jobs.values():
                    machine.term = self.log.term
            elif isinstance(action, Promised | Activated | Ended | Superseded):
                self.log.append(job, action)  # raises if it cannot: what is not on disk must not be spoken of

    def _write_event(self, entry: Any, job: str = "") -> None:
        if self.events is not None:
            self.events.write(entry if not job else type(entry)(**{**_fields(entry), "job": job}))

    def _say_note(self, job: str, note: Note) -> None:
        if note.kind in ("promised", "joined"):
            return
        fields = " ".join(f"{name}={_short(value)}" for name, value in note.fields.items())
        line = f"{job}: {note.kind} {fields}"
        if note.kind == "waiting":  # said less and less often while it is the same
            whom, next_s = self._waiting.get(job, ("", 0.0))
            if note.fields["whom"] == whom and note.fields["since_s"] < next_s:
                return
            self._waiting[job] = (note.fields["whom"], 2.0 * note.fields["since_s"])
        self.say(line)


def _short(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."


def _fields(entry: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def add_to(server: grpc.aio.Server, service: LighthouseService) -> None:
    """Registers the service."""
    lighthouse_pb2_grpc.add_LighthouseServicer_to_server(service, server)
