"""Fetches a whole state from all donors at one time, straight into the joiner's own tensors."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.groups import Note
from lightkeeper.manager.state.layout import (
    LAYOUT_BYTES_MAX,
    STATE_BYTES_MAX,
    Layout,
    LayoutError,
    state_name_to_json,
)
from lightkeeper.manager.state.registry import StateRegistry
from lightkeeper.manager.state.restore import StateDoesNotFit, Target
from lightkeeper.manager.transfer.client import DonorRefused, StartOver, TransferFailed, connect, receive_reply
from lightkeeper.manager.transfer.ranges import RangeQueue
from lightkeeper.manager.transfer.wire import Connection, WireError
from lightkeeper.words import counted

_log = logging.getLogger(__name__)

AHEAD = 2  # ranges asked for at one time on a connection, so that the donor never waits for the next request
_MIB = 1 << 20
_SLOW = 0.25  # of the expected rate: below this a line warns
_SLOW_AFTER_S = 2.0


@dataclass(frozen=True)
class Progress:
    """How far a transfer is.

    Attributes:
        nbytes: Bytes received.
        total: Bytes of the state.
        seconds: Since its start.
        donors: How many donors are in use.
    """

    nbytes: int
    total: int
    seconds: float
    donors: int

    @property
    def mib_per_s(self) -> float:
        """Rate since the start."""
        return self.nbytes / _MIB / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return (
            f"{self.nbytes / _MIB:.0f} of {self.total / _MIB:.0f} MiB from {counted(self.donors, 'donor')} in "
            f"{self.seconds:.1f} s, {self.mib_per_s:.0f} MiB/s"
        )


@dataclass(frozen=True)
class Fetched:
    """A state that was fetched, restored and verified.

    Attributes:
        name: The entry that was applied last in it.
        fingerprint: Of the whole state.
        nbytes: Its size.
        seconds: From the first request to the verified state.
        by_donor: Bytes from each donor, by address.
        dropped: Why a donor was not used to the end, by address.
        again: Ranges that came damaged and were fetched again.
    """

    name: Entry
    fingerprint: str
    nbytes: int
    seconds: float
    by_donor: dict[str, int]
    dropped: dict[str, str]
    again: int

    @property
    def mib_per_s(self) -> float:
        """Rate over all of it."""
        return self.nbytes / _MIB / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Options:
    """How a state is fetched.

    Attributes:
        timeout_s: Bound on all of it, in seconds.
        stall_s: A connection on which no byte moves for so long is given up.
        connections: At least so many at one time, over all donors.
        source_host: Own address to connect from; None for the one that routes to the donor.
        bytes_max: Bound on the size of the state.
        expected_mib_s: A rate far under it is warned about; None for no warning.
        progress_s: A line at least every so many seconds.
        verify: Of the restored state, "all" reads every byte anew and compares; "moved" what did not arrive in the
            very memory where it lies now. Each range was checked as it arrived, and the rest is always compared.
        from_step: A copy with fewer steps behind it, of an earlier boundary, is as good as none.
    """

    timeout_s: float
    stall_s: float = 10.0
    connections: int = 2
    source_host: str | None = None
    bytes_max: int = STATE_BYTES_MAX
    expected_mib_s: float | None = None
    progress_s: float = 5.0
    verify: Literal["all", "moved"] = "moved"
    from_step: int = 0


def fetch_state(
    donors: Sequence[str],
    token: str,
    registry: StateRegistry,
    name: Entry | None,
    options: Options,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    note: Note = _log.info,
) -> Fetched:
    """Replace the state here by that of the donors; on the training thread.

    Args:
        donors: Addresses of their servers, which hold the same state.
        token: The job's token.
        registry: What is replaced.
        name: Of the state; None for the newest of the first donor that answers.
        options: Bounds and choices.
        on_progress: Called at least every `progress_s`, and at the end.
        note: Takes one line for the log.

    Raises:
        StateDoesNotFit: it is not one that this rank could hold; nothing was overwritten.
        StartOver: no donor holds the state of this name any more.
        TransferFailed: it could not be fetched whole, with the last cause; `torn` says whether the state here is of no
            use any more.
    """
    started = time.monotonic()
    asked = _ask_all(donors, token, name, options, started + options.timeout_s)
    for address, cause in asked.dropped.items():
        if address not in asked.passed:
            note(f"{address} is no donor: {cause}")
    target = Target(registry, asked.layout, options.bytes_max)
    transfer = _Transfer(asked, token, target, options, started)
    try:
        transfer.run(on_progress, note)
        fingerprint = transfer.agreed_fingerprint(note)
        target.finish()
        _verify(target, fingerprint, None if options.verify == "all" else transfer.checksums)
    except TransferFailed as e:
        e.torn = target.opened
        raise
    fetched = transfer.result(fingerprint)
    note(
        f"fetched the state of {fetched.name}: {fetched.nbytes / _MIB:.0f} MiB in {fetched.seconds:.2f} s, "
        f"{fetched.mib_per_s:.0f} MiB/s, from {len(fetched.by_donor)} donors"
    )
    return fetched


def _verify(target: Target, fingerprint: str, checksums: Sequence[str] | None) -> None:
    try:
        target.verify(fingerprint, checksums)
    except StateDoesNotFit as e:
        raise TransferFailed(str(e)) from e


@dataclass
class _Asked:
    """What the donors said about the state."""

    layout: Layout
    donors: list[str]
    dropped: dict[str, str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)  # of these, who holds no such state: past the boundary, as many are


def _ask_all(donors: Sequence[str], token: str, name: Entry | None, options: Options, until: float) -> _Asked:
    asked: _Asked | None = None
    dropped: dict[str, str] = {}
    passed: set[str] = set()
    for address in dict.fromkeys(donors):
        wanted = name if asked is None else asked.layout.name
        try:
            with _connect(address, token, options, until) as connection:
                layout = _ask(connection, wanted, None if asked is None else asked.layout)
        except (WireError, LayoutError, OSError) as e:
            if isinstance(e, DonorRefused) and e.kind == "never":
                passed.add(address)
            dropped[address] = str(e)
            continue
        if layout.name.step + 1 < options.from_step:
            passed.add(address)
            dropped[address] = f"its copy is that before step {layout.name.step + 1}"
            continue
        if asked is None:
            asked = _Asked(layout, [], dropped, passed)
        asked.donors.append(address)
    if asked is None:
        kind = StartOver if dropped and passed == set(dropped) else TransferFailed
        causes = "; ".join(f"{address}: {cause}" for address, cause in dropped.items())
        raise kind(f"no donor for the state of {name or 'the newest step'}: {causes or 'none was named'}")
    return asked


def _ask(connection: Connection, name: Entry | None, known: Layout | None) -> Layout:
    """The layout of a donor's state, or `known` if it is the same."""
    connection.send_header({"state": None if name is None else state_name_to_json(name)})
    reply = receive_reply(connection)
    nbytes = reply.get("nbytes")
    if type(nbytes) is not int or not 0 < nbytes <= LAYOUT_BYTES_MAX:
        raise WireError(f"the description of the state has {str(nbytes)[:40]} bytes: at most {LAYOUT_BYTES_MAX}")
    text = bytearray(nbytes)
    connection.receive_into(memoryview(text))  # also if it is known: unread bytes would break the connection off
    if known is not None:
        if reply.get("state") != state_name_to_json(known.name) or reply.get("digest") != known.digest:
            raise WireError("it holds another state than the first donor")
        return known
    if xxhash.xxh3_64_hexdigest(text) != reply.get("xxh3_64"):
        raise WireError("the description of the state came damaged")
    layout = Layout.from_bytes(bytes(text))
    if name not in (None, layout.name) or layout.digest != reply.get("digest"):
        raise WireError("the donor describes another state than it was asked for")
    return layout


def _connect(address: str, token: str, options: Options, until: float) -> Connection:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time for this transfer is up")
    return connect(address, token, left, options.stall_s, options.source_host)


class _Transfer:
    """The ranges of one state on their way."""

    def __init__(self, asked: _Asked, token: str, target: Target, options: Options, started: float) -> None:
        self._asked = asked
        self._layout = asked.layout
        self._token = token
        self._target = target
        self._options = options
        self._started = started
        self._until = started + options.timeout_s
        self._queue = RangeQueue(self._layout.ranges, asked.donors)
        self.checksums = [""] * self._layout.ranges
        self._moved: list[int] = []  # bytes by thread
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()

    def run(self, on_progress: Callable[[Progress], None], note: Note) -> None:
        """Fetch all ranges.

        Raises:
            TransferFailed: that is not possible.
        """
        threads = []
        per_donor = -(-max(self._options.connections, 1) // len(self._asked.donors))
        for address in self._asked.donors:
            for _ in range(per_donor):
                self._moved.append(0)
                place = len(self._moved) - 1
                thread = threading.Thread(
                    target=self._work, args=(address, place), name=f"fetch from {address}", daemon=True
                )
                threads.append(thread)
        for thread in threads:
            thread.start()
        try:
            self._watch(on_progress, note)
        finally:
            self._queue.stop("given up")
            with self._lock:
                for connection in self._connections:
                    connection.shutdown()
            for thread in threads:
                thread.join()
        for share in self._queue.shares.values():
            if share.cause is not None:
                note(f"{share.address} is a donor no more: {share.cause}")
        if self._queue.failure is not None:
            raise TransferFailed(f"the state of {self._layout.name}: {self._queue.failure}")

    def agreed_fingerprint(self, note: Note) -> str:
        """The fingerprint of what arrived, which every donor must have.

        Raises:
            TransferFailed: a donor has another, or none could be asked.
        """
        mine = self._layout.fingerprint(self.checksums)
        confirmed = 0
        for address in self._queue.alive():
            try:
                with _connect(address, self._token, self._options, self._until) as connection:
                    connection.send_header({"state": state_name_to_json(self._layout.name), "whole": True})
                    theirs = receive_reply(connection).get("fingerprint")
            except (WireError, OSError) as e:
                note(f"{address} did not confirm the fingerprint: {e}")
                self._queue.drop(address, str(e))
                continue
            if theirs != mine:
                raise TransferFailed(
                    f"the state of {self._layout.name}: the donors do not hold the same bits: {address} has "
                    f"fingerprint {str(theirs)[:32]}, and what came from {', '.join(self._asked.donors)} has {mine}"
                )
            confirmed += 1
        if not confirmed:
            raise TransferFailed(f"the state of {self._layout.name}: no donor is left to confirm its fingerprint")
        return mine

    def result(self, fingerprint: str) -> Fetched:
        """What came of it."""
        shares = self._queue.shares.values()
        return Fetched(
            self._layout.name, fingerprint, self._layout.nbytes, time.monotonic() - self._started,
            {share.address: share.nbytes for share in shares if share.nbytes},
            {**self._asked.dropped, **{share.address: share.cause for share in shares if share.cause}},
            self._queue.again,
        )  # fmt: skip

    def _watch(self, on_progress: Callable[[Progress], None], note: Note) -> None:
        warned = False
        said = time.monotonic()
        while True:
            left = self._until - time.monotonic()
            over = self._queue.wait(max(0.0, min(left, self._options.progress_s, _SLOW_AFTER_S)))
            now = time.monotonic()
            progress = Progress(sum(self._moved), self._layout.nbytes, now - self._started, len(self._queue.alive()))
            if over or now - said >= self._options.progress_s:
                on_progress(progress)
            if over:
                return
            if now - said >= self._options.progress_s:
                note(f"fetching the state of {self._layout.name}: {progress}")
                said = now
            expected = self._options.expected_mib_s
            if not warned and expected and progress.seconds >= _SLOW_AFTER_S:
                warned = progress.mib_per_s < _SLOW * expected
                if warned:
                    note(f"warning: {progress}: far under the {expected:.0f} MiB/s that were expected")
            if left <= 0:
                self._queue.stop(f"not there after {self._options.timeout_s} s: {progress}")

    def _work(self, donor: str, place: int) -> None:
        """Fetch ranges from one donor over one connection, and over another one if it breaks."""
        claimed: deque[int] = deque()
        while True:
            if not claimed:
                index = self._queue.claim(donor, wait=True)
                if index is None:
                    return
                claimed.append(index)
            try:
                connection = _connect(donor, self._token, self._options, self._until)
            except (WireError, OSError) as e:
                self._queue.give_back(donor, list(claimed), f"{donor}: {e}")
                self._queue.drop(donor, f"{donor}: {e}")
                return
            try:
                with connection:
                    self._fetch_over(connection, donor, place, claimed)
            except DonorRefused as e:
                self._queue.give_back(donor, list(claimed), f"{donor}: {e}")
                self._queue.drop(donor, f"{donor}: {e}")
                return
            except _Damaged as e:
                self._queue.give_back(donor, list(claimed), f"{donor}: {e}", damaged=True)
            except (WireError, OSError) as e:
                self._queue.give_back(donor, list(claimed), f"{donor}: {e}")
            except BaseException as e:
                self._queue.give_back(donor, list(claimed), repr(e))
                self._queue.stop(f"a bug: {e!r}")
                raise
            claimed.clear()

    def _fetch_over(self, connection: Connection, donor: str, place: int, claimed: deque[int]) -> None:
        """Fetch until there is nothing left; `claimed` holds what was claimed and has not come."""
        with self._lock:
            self._connections.add(connection)
        try:
            for index in claimed:
                self._request(connection, index)
            while True:
                while len(claimed) < AHEAD:
                    more = self._queue.claim(donor, wait=not claimed)
                    if more is None:
                        break
                    claimed.append(more)
                    self._request(connection, more)
                if not claimed:
                    return
                self._receive(connection, place, claimed[0])
                index = claimed.popleft()
                start, end = self._layout.bounds(index)
                self._queue.done(donor, index, end - start)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _request(self, connection: Connection, index: int) -> None:
        connection.send_header({"state": state_name_to_json(self._layout.name), "range": index})

    def _receive(self, connection: Connection, place: int, index: int) -> None:
        reply = receive_reply(connection)
        if reply.get("range") != index:
            raise WireError(f"the donor sends another range than {index}")

        def moved(count: int) -> None:
            self._moved[place] += count

        checksum = connection.receive_checked(self._target.open(index), moved)
        if checksum != reply.get("xxh3_64"):
            raise _Damaged(f"range {index} arrived with another checksum than it was sent with")
        self.checksums[index] = checksum
        self._target.arrived(index)


class _Damaged(WireError):
    """A range came whole, with other bytes than were sent."""
