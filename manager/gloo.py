"""An epoch's group over gloo: torchft's reconfigurable group, made abortable.

Gloo's own `abort()` does nothing: a pending all-reduce with a frozen peer waits for its time-out. So the
group knows its own sockets and shuts them down; the pending operation then raises within milliseconds. To
know them it reads the address that each member publishes at the rendezvous: a socket is the group's if its
local port is this member's listener or its peer is another member's listener.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import socket
import struct
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft.process_group
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ProcessGroupGloo

from lightkeeper.manager.groups import EpochGroup, GroupFailed, KeyValue
from lightkeeper.manager.sockets import Broken, Endpoint, HeldSocket, read_sockaddr, refusing, tcp_sockets
from lightkeeper.manager.store import RendezvousStore

_WAIT_SLICE_S = 1.0  # a wait in C++ keeps Python's signal handlers waiting, so it is cut into slices
_GRACE_S = 0.2  # after an abort a pending operation raises within milliseconds, or never
_SETTLE_S = 0.05  # in which it shows who is gone, or that a recovery has begun already
_STRANGER = struct.pack("<q", 1 << 62)  # to a listener of gloo's: a member that no group has, kept and never used
_PROCESS_ENDS = "the process ends"
_NEVER_S = 24 * 3600.0  # gloo's own time-out per operation: ours are given to `wait`, `abort` ends the rest
_TRANSPORT_ERROR = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|Socket closed|Broken pipe|[Tt]imed out|not connected"
)
_REMOTE = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d+)")


class AbortableGloo(torchft.process_group.ProcessGroupGloo):
    """torchft's gloo process group, formed over any store and bound to a chosen address.

    Args:
        host: Address or name of this machine to bind and advertise.
        timeout_s: Bound on connecting to the other members, in seconds.
        threads: Number of gloo's worker threads; each carries one collective at a time. With two, one adds
            while the other one's data is on its way: a tenth of a step less at 100 MB than with one.
        name: As the flight recorder calls it; the members of one group must have the same.
    """

    def __init__(self, host: str, timeout_s: float, threads: int = 2, name: str = "") -> None:
        super().__init__(timedelta(seconds=timeout_s))
        self._host = host
        self._name = name
        self._threads = threads

    def form(self, store: dist.Store, rank: int, world_size: int) -> None:
        """Connect to all other members; blocks until all have connected."""
        self._pg = self._create_pg(store, rank, world_size)

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)]
        options._threads = self._threads
        options._timeout = self._timeout
        backend = ProcessGroupGloo(store, rank, world_size, options)
        backend.set_timeout(timedelta(seconds=_NEVER_S))
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(self._name)  # type: ignore[arg-type]  # a type of its own in the stubs alone
        group._set_group_desc("epoch")
        return group


class Members:
    """The listening addresses of a forming group, read from what its members publish at the rendezvous.

    A member publishes, under "<prefix>/<slot>", its host name and its listener's `sockaddr`, both with a
    length in front. That this is so is checked on this member's own value, against the listening sockets of
    this process.
    """

    def __init__(self, slot: int, size: int) -> None:
        self._slot = slot
        self._lock = threading.Lock()
        self._values: dict[int, bytes] = {}
        self._size = size

    def seen(self, key: str, value: bytes) -> None:
        """Take note of a key of the store."""
        name = key.rpartition("/")[2]
        if name.isdigit() and int(name) < self._size:
            with self._lock:
                self._values[int(name)] = value

    def listeners(self) -> dict[int, Endpoint]:
        """Slot to listening address, of the members that have published theirs.

        Raises:
            GroupFailed: the values do not read as expected (another version of gloo).
        """
        with self._lock:
            values = dict(self._values)
        read = {slot: read_sockaddr(value[_sockaddr_offset(value) :]) for slot, value in values.items()}
        bad = [slot for slot, endpoint in read.items() if endpoint is None]
        if bad:
            text = f"this gloo publishes addresses in a form that cannot be read (slot {bad[0]})"
            raise GroupFailed(text, local=True)
        return {slot: endpoint for slot, endpoint in read.items() if endpoint is not None}

    def verify(self, sockets: list[HeldSocket]) -> None:
        """Check that this member's published address is one of this process's listening sockets."""
        mine = self.listeners().get(self._slot)
        if mine is None or not any(s.listening and s.local.port == mine.port for s in sockets):
            text = f"no listening socket of this process is at {mine}: this gloo could not be aborted"
            raise GroupFailed(text, local=True)

    def sockets(self) -> dict[HeldSocket, int | None]:
        """The group's connected sockets now, each with the slot at its other end where that is known."""
        listeners = self.listeners()
        mine = listeners.pop(self._slot, None)
        slots = {endpoint: slot for slot, endpoint in listeners.items()}
        found: dict[HeldSocket, int | None] = {}
        for held in tcp_sockets():
            if held.listening or held.peer is None:
                continue
            if held.peer in slots:
                found[held] = slots[held.peer]
            elif mine is not None and held.local.port == mine.port:
                found[held] = None
        return found

    def unblock(self) -> None:
        """End a constructor that waits for a member to connect: connect in its place, and leave again.

        Gloo takes a connection for the member whose slot its first eight bytes name. Where that fails, the
        constructor ends at its own time-out.
        """
        mine = self.listeners().get(self._slot)
        if mine is None:
            return
        for slot in range(self._size):
            try:
                with socket.create_connection(mine, timeout=1.0) as sock:
                    sock.sendall(struct.pack("<q", slot))
            except OSError:
                return


def _sockaddr_offset(value: bytes) -> int:
    return 8 + int.from_bytes(value[:8], "little") + 8


class GlooGroup:
    """See `groups.EpochGroup`."""

    def __init__(self, gloo: AbortableGloo, members: Members, slot: int, size: int, name: str) -> None:
        self.slot = slot
        self.size = size
        self.name = name
        self._gloo: AbortableGloo | None = gloo
        self._lock = threading.Lock()
        self._aborted: str | None = None
        self._aborted_s = 0.0
        members.verify(tcp_sockets())
        self._sockets = members.sockets()
        self._broken = Broken(self._sockets)
        self._listeners = {endpoint: other for other, endpoint in members.listeners().items()}

    def learn_peers(self, timeout_s: float) -> None:
        """Exchange which local ports connect to whom, so that every connection has a slot at its other end.

        It is also the first collective: a group that can do it is whole.
        """
        ports = torch.zeros(self.size, dtype=torch.int64)
        for held, slot in self._sockets.items():
            if slot is not None:
                ports[slot] = held.local.port
        table = self.all_gather(ports, timeout_s)
        origin = {int(table[other][self.slot]): other for other in range(self.size) if other != self.slot}
        for held, slot in self._sockets.items():
            if slot is None and held.peer is not None:
                self._sockets[held] = origin.get(held.peer.port)

    def all_reduce(self, tensor: torch.Tensor) -> _GlooReduction:
        """See `groups.EpochGroup`."""
        return self._start(lambda gloo: gloo.allreduce([tensor], AllreduceOptions()), "all-reduce")

    def all_gather(self, tensor: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """See `groups.EpochGroup`."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        options = AllgatherOptions()
        self._start(lambda gloo: gloo.allgather([parts], [tensor], options), "all-gather").wait(timeout_s)
        return parts

    def _start(self, call: Any, what: str) -> _GlooReduction:
        gloo = self._gloo
        if self._aborted is not None or gloo is None:
            raise self.failure(what, None)
        try:
            return _GlooReduction(self, call(gloo), what)
        except RuntimeError as e:
            raise self.failure(what, e) from e

    def abort(self, reason: str) -> None:
        """See `groups.EpochGroup`."""
        with self._lock:
            if self._aborted is not None or self._gloo is None:
                return
            self._aborted, self._aborted_s = reason, time.monotonic()
            self._broken.close()
        for held in self._sockets:
            held.shut_down()

    @property
    def given_up(self) -> bool:
        """Aborted for so long that gloo will not raise any more: it can lose an error of a connection that broke
        while the process stood still (seen after a freeze).
        """
        return self._aborted is not None and time.monotonic() - self._aborted_s > _GRACE_S

    def close(self) -> None:
        """See `groups.EpochGroup`."""
        with self._lock:
            gloo, self._gloo = self._gloo, None
            self._broken.close()
        if gloo is not None:
            _threads.destroy(gloo, f"close {self.name}")

    def suspects(self) -> tuple[int, ...]:
        """The slots of members that are gone, of those whose connection to this member broke.

        Nothing after an abort here, which breaks all connections. A member that dies makes the others break their
        connections to each other, gloo's threads faster than the kernel closes all of the dead one's: so whose process
        nobody listens for any more is gone, and if everybody is there it is the connection that broke first.
        """
        until = time.monotonic() + _SETTLE_S
        while True:
            with self._lock:
                over = self._aborted is not None or self._gloo is None
                broken = () if over else self._broken.in_order()
            slots = [slot for slot in dict.fromkeys(map(self._sockets.get, broken)) if slot is not None]
            listeners = {slot: endpoint for endpoint, slot in self._listeners.items() if slot in slots}
            refused = refusing(listeners.values(), _STRANGER, _SETTLE_S)
            gone = tuple(slot for slot in sorted(slots) if listeners.get(slot) in refused)
            if gone or not slots or time.monotonic() > until:
                return gone or tuple(slots[:1])
            time.sleep(_SETTLE_S / 20)

    def failure(self, what: str, cause: Exception | None) -> GroupFailed:
        """What to raise for `cause`, an error of gloo's; None if the group was aborted or closed before."""
        if self._aborted is not None:
            return GroupFailed(f"{what} of {self.name} aborted: {self._aborted}", aborted=self._aborted)
        if cause is None:
            return GroupFailed(f"{what} on {self.name}, which is closed", local=True)
        text = str(cause).partition("\n")[0]
        named = {self._listeners.get(Endpoint(a, int(p)), self.slot) for a, p in _REMOTE.findall(text)}
        suspects = self.suspects() or tuple(sorted(named - {self.slot}))  # gloo names who it waited for: a victim too
        local = not suspects and _TRANSPORT_ERROR.search(text) is None
        return GroupFailed(f"{what} of {self.name} failed: {text}", local=local, suspects=suspects)


class _GlooReduction:
    def __init__(self, group: GlooGroup, work: dist.Work, what: str) -> None:
        self._group = group
        self._work: dist.Work | None = work
        self._what = what
        self._failed: GroupFailed | None = None

    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self._work is not None:
            left = until - time.monotonic()
            if self._wait_slice(self._work, max(0.001, min(left, _WAIT_SLICE_S))):
                self._work = None  # it would keep the group's sockets open
            elif self._group.given_up:
                raise self._group.failure(self._what, None)
            elif left <= _WAIT_SLICE_S:
                text = f"{self._what} of {self._group.name} unfinished after {timeout_s:.1f} s"
                raise GroupFailed(text, suspects=self._group.suspects(), waited=True)
        if self._failed is not None:
            raise self._failed

    def _wait_slice(self, work: dist.Work, timeout_s: float) -> bool:
        """Whether it has ended, well or not, within `timeout_s`."""
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as e:
            if not work.is_completed():
                return False
            self._failed = self._group.failure(self._what, e)
        return True


class FormGloo:
    """Forms a gloo group; see `groups.Forming`."""

    def __init__(self, keys: KeyValue, slot: int, size: int, timeout_s: float, name: str, host: str) -> None:
        self._keys, self._slot, self._size = keys, slot, size
        self._timeout_s, self._name, self._host = timeout_s, name, host
        self._members = Members(slot, size)
        self._lock = threading.Lock()
        self._interrupted: str | None = None
        self._formed: GlooGroup | None = None

    def form(self) -> EpochGroup:
        """Rendezvous, connect to every member, and exchange one small message with all of them."""
        with _threads.forming(self):
            return self._form()

    def _form(self) -> EpochGroup:
        until = time.monotonic() + self._timeout_s
        gloo = AbortableGloo(self._host, self._timeout_s, name=self._name)
        try:
            store = RendezvousStore(self._keys, self._timeout_s, self._members.seen)
            gloo.form(store, self._slot, self._size)
            group = GlooGroup(gloo, self._members, self._slot, self._size, self._name)
            with self._lock:
                self._formed = group
            if self._interrupted is not None:
                group.abort(self._interrupted)
            group.learn_peers(max(0.0, until - time.monotonic()))
            return group
        except (RuntimeError, TimeoutError) as e:
            failure = self._failure(e)
        # Raised out here and unchained: a traceback would keep the frames, and with them the sockets, alive.
        if self._formed is not None:
            self._formed.close()
        else:
            _threads.destroy(gloo, f"give up {self._name}")
        del gloo
        raise failure

    def interrupt(self, reason: str) -> None:
        """Wake whatever `form` waits for: a key, a connection, the first message."""
        with self._lock:
            if self._interrupted is not None:
                return
            self._interrupted = reason
            formed = self._formed
        self._keys.abort(reason)
        if formed is not None:
            formed.abort(reason)
            return
        for held in self._members.sockets():
            held.shut_down()
        self._members.unblock()

    def _failure(self, cause: Exception) -> GroupFailed:
        if self._interrupted is not None:
            text = f"building {self._name} aborted: {self._interrupted}"
            return GroupFailed(text, aborted=self._interrupted)
        if isinstance(cause, GroupFailed):  # anew: its traceback would keep the constructor's frames and sockets
            return GroupFailed(
                str(cause), local=cause.local, suspects=cause.suspects, aborted=cause.aborted, waited=cause.waited
            )
        text = str(cause).partition("\n")[0]
        local = not isinstance(cause, TimeoutError) and _TRANSPORT_ERROR.search(text) is None
        failure = GroupFailed(f"building {self._name} failed: {text}", local=local, waited=not local)
        if local:
            failure.add_note("".join(traceback.format_exception(cause)))
        return failure


class _Threads:
    """Those that form groups; and those that destroy them, since a gloo destructor joins threads of its own.

    They end before the interpreter does. It unwinds a thread that comes back to it from C++ later, and C++ ends the
    process for that: "terminate called without an active exception".
    """

    def __init__(self) -> None:
        self._forming: dict[threading.Thread, FormGloo] = {}
        self._destroying: set[threading.Thread] = set()
        self._over = False
        self._lock = threading.Lock()
        atexit.register(self.finish, 2.0)

    @contextlib.contextmanager
    def forming(self, form: FormGloo) -> Iterator[None]:
        """This thread forms a group meanwhile.

        Raises:
            GroupFailed: the process ends.
        """
        thread = threading.current_thread()
        with self._lock:
            if self._over:
                raise GroupFailed(f"not begun: {_PROCESS_ENDS}", aborted=_PROCESS_ENDS)
            self._forming[thread] = form
        try:
            yield
        finally:
            with self._lock:
                del self._forming[thread]

    def destroy(self, gloo: AbortableGloo, name: str) -> None:
        """Destroy `gloo`, which the caller must hold no other reference to, in a thread."""
        box = [gloo]
        thread = threading.Thread(target=self._destroy, args=(box,), name=name, daemon=True)
        with self._lock, contextlib.suppress(RuntimeError):  # from Python 3.12 on, if the interpreter ends
            thread.start()
            self._destroying.add(thread)
            return
        self._destroy(box)

    def _destroy(self, box: list[AbortableGloo]) -> None:
        box.pop().shutdown()
        with self._lock:
            self._destroying.discard(threading.current_thread())

    def finish(self, timeout_s: float) -> None:
        """Interrupt what is being formed, and wait up to `timeout_s` seconds for the end of all these threads."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._over = True
            # In a forked child none lives; the sockets of those that it knows of are its parent's.
            forming = {thread: form for thread, form in self._forming.items() if thread.is_alive()}
        for form in forming.values():
            form.interrupt(_PROCESS_ENDS)
        _join(forming, until)
        with self._lock:
            destroying = tuple(self._destroying)  # also what was given up just now
        _join(destroying, until)


def _join(threads: Iterable[threading.Thread], until: float) -> None:
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


_threads = _Threads()
