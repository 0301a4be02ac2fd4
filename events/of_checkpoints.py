"""The kinds of events about checkpoints, and about the end of a run that somebody asked for."""

from __future__ import annotations

from lightkeeper.events.header import Event


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A checkpoint is committed.

    `step` steps are behind its state, which `epoch` of `term` made; `tier` is "shared" or "local". `loaded`: it was
    loaded once before, and compared. `final`: by what its state is known to be so. `pruned`: older ones deleted.
    `stood_s`: for which the training thread stood for the copy.
    """

    step: int
    epoch: int
    term: int
    tier: str
    path: str
    bytes: int
    copy_s: float
    write_s: float
    loaded: bool
    final: str
    pruned: int = 0
    stood_s: float = 0.0


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """A save came to nothing, or (`pending`) has not ended when the next one was due, or for long.

    `failures` in a row; from `alarm` on a person should look. It is tried again after `again_s` seconds.
    """

    step: int
    tier: str
    reason: str
    failures: int
    pending: bool = False
    again_s: float = 0.0
    alarm: bool = False


class CheckpointSkipped(Event, frozen=True, kw_only=True):
    """One that was not loaded, and why."""

    step: int
    tier: str
    path: str
    reason: str


class CheckpointLoaded(Event, frozen=True, kw_only=True):
    """The state was loaded from a checkpoint; `step` steps are behind it.

    `compared`: its hash with that of what was saved. `restarts`: how often the run was begun so, this time included.
    """

    step: int
    tier: str
    path: str
    bytes: int
    seconds: float
    compared: bool
    restarts: int


class StopRequested(Event, frozen=True, kw_only=True):
    """The run ends after `step` steps, as somebody asked; `reason` is empty in groups that were not asked."""

    step: int
    reason: str
