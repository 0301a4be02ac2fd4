"""What the lighthouse knows of one group's current incarnation."""

from __future__ import annotations

from dataclasses import dataclass

from lightkeeper.lighthouse.messages import Beat, Drain, Failed, Hello, Join, Query
from lightkeeper.lighthouse.names import Member, Term


@dataclass(frozen=True, slots=True)
class Gone:
    """Why a group is no longer there, and who says so.

    Attributes:
        cause: one line for the person on call.
        detected_by: ``manager`` (its own manager said so), ``stream`` (broken), ``lease`` (silent), ``frozen``,
            ``progress`` (a rank lives and does not get on), ``failures`` (named by most failed reduces), ``operator``
            or ``left``.
        rank: the rank that it is about, -1 if no single one.
        since_s: for how long it had been so when it was seen, in seconds.
        late: of one that left: it was asked to and ended before it could hand over its share.
    """

    cause: str
    detected_by: str
    phase: str = ""
    step: int = 0
    late: bool = False
    rank: int = -1
    since_s: float = 0.0

    @property
    def has_left(self) -> bool:
        """Whether it left in good order."""
        return self.detected_by == "left" and not self.late


@dataclass(slots=True)
class Group:
    """One incarnation of a group, as its stream shows it.

    Attributes:
        connection: number of its stream, None while the stream is broken.
        heard: when it was last heard, or its stream broke (monotonic seconds).
        asked_s: when it was first asked for a sign of life since it was last heard, None if it was not (monotonic).
        asked_again_s: when it was last asked (monotonic seconds).
        joined_s: when it joined (monotonic seconds).
        healing: the boundary whose state a joiner is told to fetch, None if it is told nothing.
        deaths: when earlier incarnations of it died (monotonic seconds).
        admit_s: not admitted before (monotonic seconds): a group that flaps is held back.
        query: its question whether its epoch still stands, until it is answered.
        welcomed: the term that it was asked to acknowledge on this stream.
        acknowledged: the highest term of this lighthouse that it has acknowledged.
        lost_in: number of the newest epoch prepared with it when it could not follow on: it cannot switch to that.
        leaving: why it leaves, once it has asked to.
        drain: the operator's request that it leaves, to be repeated on a new stream.
        drain_by_s: until when it may take (monotonic seconds), None if there is no such bound.
        parked: whether it was told on this stream that the job has no use for it now; None: it was told nothing.
        moved_s: when its beats last showed a later epoch or step (monotonic seconds).
        failed: its report that the newest epoch is over, until the next one is activated.
    """

    name: str
    incarnation: str
    heard: float
    connection: int | None = None
    asked_s: float | None = None
    asked_again_s: float = 0.0
    hello: Hello | None = None
    join: Join | None = None
    joined_s: float = 0.0
    query: Query | None = None
    welcomed: Term | None = None
    acknowledged: Term | None = None
    beat: Beat | None = None
    failed: Failed | None = None
    gone: Gone | None = None
    leaving: str = ""
    drain: Drain | None = None
    drain_by_s: float | None = None
    told_to_stop: bool = False
    parked: bool | None = None
    healing: int | None = None
    tries: int = 0
    lost_in: int = 0
    deaths: tuple[float, ...] = ()
    admit_s: float = 0.0
    pace_s: float = 0.0
    stepped_s: float = 0.0
    moved_s: float = 0.0

    def steps_on(self, beat: Beat, now: float) -> None:
        """Takes a beat in; `pace_s` becomes the seconds per step between a member's beats that show progress.

        Before it is one it comes to a step by a checkpoint or by a copy, thousands of them at once.
        """
        before = self.beat.step if self.beat is not None else -1
        if self.beat is None or (beat.epoch, beat.step) > (self.beat.epoch, self.beat.step):
            self.moved_s = now
        if beat.step > before:
            if self.stepped_s and self.beat is not None and self.beat.epoch:
                self.pace_s = (now - self.stepped_s) / (beat.step - before)
            self.stepped_s = now
        self.beat = beat

    def hears(self, now: float) -> None:
        """A sign of life."""
        self.heard, self.asked_s = now, None

    def hangs_up(self) -> None:
        """Its stream is over; what is asked for on the next is asked anew."""
        self.connection, self.welcomed, self.parked = None, None, None

    def asked(self, now: float) -> None:
        """It is asked for a sign of life."""
        self.asked_s, self.asked_again_s = now if self.asked_s is None else self.asked_s, now

    @property
    def follows(self) -> bool:
        """Whether it is a joiner that is healed and applies the entries as they come."""
        return self.beat is not None and self.beat.phase == "follow"

    @property
    def comes_in(self) -> bool:
        """Whether it was told what to heal from, or follows already: it is given up no more."""
        return self.healing is not None or self.follows

    @property
    def where(self) -> tuple[str, int]:
        """Phase and step of its last beat."""
        return (self.beat.phase, self.beat.step) if self.beat is not None else ("", 0)

    @property
    def in_touch(self) -> bool:
        """Whether it can be asked now."""
        return self.connection is not None and self.gone is None

    def member(self) -> Member:
        """Its entry in a member list; only after it has joined."""
        assert self.hello is not None and self.join is not None
        return Member(self.name, self.incarnation, self.hello.manager, self.join.ranks)
