"""Streams and cuts: a message is delayed, held while its link is cut, and lost only when its stream breaks.

A stream is what TCP gives: in order, and what was under way when it breaks is lost. Each end learns for itself that it
broke, perhaps seconds after the other, so a lighthouse may hold a stream whose manager has long opened another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightkeeper.simulator.clock import Clock

if TYPE_CHECKING:
    from lightkeeper.simulator.groups import GroupProcess, LastWords
    from lightkeeper.simulator.lighthouses import Lighthouse

DELAY_S = (0.0005, 0.02)
KEEPALIVE_S = (5.0, 10.0)  # until an end learns that nothing comes through (lightkeeper/wire.py)
NOTICE_S = (0.001, 0.05)  # until an end learns that the other is gone
END = object()
Link = tuple[str, str]


class Network:
    """Which links are cut, each way by itself; and how slow they are.

    Attributes:
        slow_s: further delay of messages from or to a name, in seconds.
        messages: how many were delivered.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.messages = 0
        self.slow_s: dict[str, float] = {}
        self._cuts: dict[Link, int] = {}
        self._held: dict[Link, list[Callable[[], None]]] = defaultdict(list)
        self._streams: dict[Link, list[Stream]] = defaultdict(list)

    @property
    def whole(self) -> bool:
        """Whether nothing is cut."""
        return not self._cuts

    def is_cut(self, sender: str, receiver: str) -> bool:
        """Whether nothing comes through this way."""
        return bool(self._cuts) and (sender, receiver) in self._cuts

    def apart(self, names: tuple[str, ...]) -> Link | None:
        """A link between two of these that is cut, or None."""
        if not self._cuts:
            return None
        return next(((a, b) for a in names for b in names if (a, b) in self._cuts), None)

    def cut(self, sender: str, receiver: str, seconds: float) -> None:
        """Nothing comes through this way for so long."""
        link = (sender, receiver)
        self._cuts[link] = self._cuts.get(link, 0) + 1
        self.clock.after(seconds, self._heal, link)
        for stream in self._streams.pop(link, []) + self._streams.pop((receiver, sender), []):
            if stream.watch_keepalive():
                self._streams[stream.link].append(stream)

    def opened(self, stream: Stream) -> None:
        """A stream is there to be cut."""
        self._streams[stream.link] = [s for s in self._streams[stream.link] if s.held_by_anyone] + [stream]
        if self.is_cut(*stream.link) or self.is_cut(*reversed(stream.link)):
            stream.watch_keepalive()

    def when_healed(self, link: Link, event: Callable[[], None]) -> None:
        """Calls this once the link is whole again."""
        self._held[link].append(event)

    def _heal(self, link: Link) -> None:
        self._cuts[link] -= 1
        if self._cuts[link] == 0:
            del self._cuts[link]
            for event in self._held.pop(link, []):
                event()


class Way:
    """One direction of a stream."""

    __slots__ = ("_deliver", "_held", "_last", "_link", "_network", "broken")

    def __init__(self, network: Network, link: Link, deliver: Callable[[Any], None]) -> None:
        self._network, self._link, self._deliver = network, link, deliver
        self._last = 0.0
        self._held: list[Any] = []
        self.broken = False

    def send(self, message: Any) -> None:
        """Sends a message; it arrives after those before it, unless the stream breaks first."""
        if self.broken:
            return
        network, clock = self._network, self._network.clock
        delay_s = clock.uniform(*DELAY_S)
        if network.slow_s:
            delay_s += clock.random.random() * max(network.slow_s.get(name, 0.0) for name in self._link)
        self._last = max(self._last, clock.now + delay_s)
        clock.at(self._last, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self.broken:
            return
        if self._held:
            self._held.append(message)
        elif self._network.is_cut(*self._link):
            self._held.append(message)
            self._network.when_healed(self._link, self._flush)
        else:
            self._network.messages += 1
            self._deliver(message)

    def _flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._arrive(message)


class Stream:
    """Both ways between a manager and a lighthouse."""

    def __init__(
        self, network: Network, process: GroupProcess | LastWords, lighthouse: Lighthouse, number: int
    ) -> None:
        self.network, self.process, self.lighthouse, self.number = network, process, lighthouse, number
        self.link: Link = (process.group, lighthouse.address)
        self.up = Way(network, self.link, self._to_lighthouse)
        self.down = Way(network, (lighthouse.address, process.group), self._to_manager)
        self.at_manager = True
        self.at_lighthouse = False
        network.opened(self)

    @property
    def held_by_anyone(self) -> bool:
        """Whether an end is still there."""
        return self.at_manager or self.at_lighthouse

    @property
    def comes_through(self) -> bool:
        """Whether what is sent to the lighthouse now is read by it."""
        cut = self.network.is_cut(*self.link) or self.network.is_cut(*reversed(self.link))
        return self.at_lighthouse and self.lighthouse.up and not self.lighthouse.frozen and not cut

    def _to_lighthouse(self, message: Any) -> None:
        if message is END:
            self.lost_at_lighthouse()
        else:
            self.lighthouse.take(self, message)

    def _to_manager(self, message: Any) -> None:
        if message is END:
            self.lost_at_manager()
        else:
            self.process.take(self, message)

    # ------------------------------------------------------------ ends

    def break_it(self) -> None:
        """What is under way is lost; each end learns it for itself."""
        self.up.broken = self.down.broken = True
        clock = self.network.clock
        clock.after(clock.uniform(*NOTICE_S), self.lost_at_lighthouse)
        clock.after(clock.uniform(*NOTICE_S), self.lost_at_manager)

    def manager_gone(self, orderly: bool) -> None:
        """The manager's end closes; in good order, what it sent before still arrives."""
        self.at_manager, self.down.broken = False, True
        self._end(self.up, self.lost_at_lighthouse, orderly)

    def lighthouse_gone(self, orderly: bool) -> None:
        """The lighthouse's end closes."""
        self.at_lighthouse, self.up.broken = False, True
        self._end(self.down, self.lost_at_manager, orderly)

    def _end(self, way: Way, lost: Callable[[], None], orderly: bool) -> None:
        if orderly or self.network.clock.chance(0.5):
            way.send(END)
        else:
            way.broken = True
            self.network.clock.after(self.network.clock.uniform(*NOTICE_S), lost)

    def watch_keepalive(self) -> bool:
        """The link is cut: each end gives the stream up after a while, unless the cut is over by then."""
        if not self.held_by_anyone:
            return False
        clock = self.network.clock
        for lost in (self.lost_at_lighthouse, self.lost_at_manager):
            clock.after(clock.uniform(*KEEPALIVE_S), self._unless_healed, lost)
        return True

    def _unless_healed(self, lost: Callable[[], None]) -> None:
        if self.network.is_cut(*self.link) or self.network.is_cut(*reversed(self.link)):
            lost()

    def lost_at_lighthouse(self) -> None:
        """The lighthouse learns that the stream is over."""
        if self.at_lighthouse:
            self.lighthouse.lost(self)
            if self.at_manager:
                self._learns(self.lost_at_manager)

    def lost_at_manager(self) -> None:
        """The manager learns that the stream is over."""
        if self.at_manager:
            self.process.lost(self)
            if self.at_lighthouse:
                self._learns(self.lost_at_lighthouse)

    def _learns(self, lost: Callable[[], None]) -> None:
        """The other end is told, or (through a cut) learns it by its own keepalive."""
        cut = self.network.is_cut(*self.link) or self.network.is_cut(*reversed(self.link))
        self.network.clock.after(self.network.clock.uniform(*(KEEPALIVE_S if cut else NOTICE_S)), lost)
