"""What a rank writes down about its steps: who computed what, how long it stood, under which entry it committed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lightkeeper.events import schema
from lightkeeper.events.writer import EventLog
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager import local
from lightkeeper.manager.settings import Settings
from lightkeeper.words import say

DIFFER_AGAIN_STEPS = 100

if TYPE_CHECKING:
    from lightkeeper.manager.reducer import Outcome
    from lightkeeper.manager.step import Step
    from lightkeeper.manager.transfer.joiner import Fetched


class StepRecord:
    """The running account of the step in progress.

    Attributes:
        microbatches: those that this group has put into the step so far.
        computed: forward passes this rank ran for the step.
    """

    def __init__(self, settings: Settings, incarnation: str, rank: int) -> None:
        self.rank = rank
        self.microbatches: list[int] = []
        self.computed = 0
        self._log: EventLog | None = None
        if settings.run_folder:
            name = f"rank {settings.group}/{rank}"
            self._log = EventLog(
                settings.run_folder, name, job=settings.job, group=settings.group, incarnation=incarnation
            )
        self._ended_s = time.monotonic()
        self._differ_since = -1
        self._differ_again = 0  # from this step on it is said again
        self._start()

    def _start(self) -> None:
        self.microbatches, self.computed, self._attempts = [], 0, 0
        self._waited_s, self._standing_since_s = 0.0, 0.0
        self._failed_s: float | None = None
        self._failed_computed = 0
        self._further_s = 0.0
        self._adopted: local.Adopt | None = None

    def write(self, event: schema.Event) -> None:
        """Writes an event, if the run has a folder."""
        if self._log is not None:
            self._log.write(event)

    # ------------------------------------------------------------ a step, in the order of the calls

    def begin(self) -> None:
        """A step begins."""
        self._start()

    def computes(self, k: int) -> None:
        """A microbatch starts."""
        self._stop_standing()
        self.microbatches.append(k)
        self.computed += 1

    def stands(self) -> None:
        """The rank waits for the others from now on, until it computes or commits."""
        self._stop_standing()
        self._standing_since_s = time.monotonic()

    def reduces(self) -> None:
        """The rank has computed what it had, and stands from now on."""
        self._attempts += 1
        self.stands()

    def failed(self) -> None:
        """The reduce (or what repeats it) has failed."""
        if self._failed_s is None:
            self._failed_s, self._failed_computed = time.monotonic(), self.computed

    def adopts(self, adopt: local.Adopt, size: int) -> None:
        """The entry was fetched from a donor (or found whole in the own buckets: size 0)."""
        self._adopted = adopt
        self.write(
            schema.Adopted(
                step=adopt.step,
                epoch=adopt.epoch,
                term=adopt.term,
                donor=adopt.donor,
                bytes=size,
                rank=self.rank,
            )
        )

    def commits(self, outcome: Outcome) -> None:
        """The group has committed."""
        self._outcome = outcome
        self._stop_standing()
        self._committed_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds of the step at hand for which the rank has been waiting for the other groups."""
        return self._waited_s

    def applied(self, step: Step, entry: Entry, digest: str | None) -> None:
        """The loop's body has ended."""
        number, term = entry.epoch.number, entry.epoch.term.number
        if self._failed_s is not None:
            further = tuple(self.microbatches[self._failed_computed :])
            stall_s = self._committed_s - self._failed_s - self._further_s
            self.write(
                schema.Recovered(
                    step=step.index, epoch=number, term=term, rank=self.rank, further=further, stall_s=stall_s
                )
            )
        numbers = {name: float(value) for name, value in self._outcome.reduced.items() if value.numel() == 1}
        self.write(
            schema.Committed(
                step=step.index,
                epoch=number,
                term=term,
                rank=self.rank,
                total=step.total,
                microbatches=tuple(self.microbatches),
                computed=self.computed,
                counted=self._outcome.total.microbatches,
                seconds=self._committed_s - self._ended_s,
                wait_s=self._waited_s,
                tokens=numbers.get("tokens"),
                loss=numbers.get("loss"),
                fingerprint=digest,
                live=step.live,
                attempts=max(1, self._attempts),
                extras=numbers,
            )
        )
        self._ended_s = self._committed_s

    # ------------------------------------------------------------ joiners

    def copied(self, step: int, pause_s: float) -> None:
        """The state was copied for a joiner, at the boundary before this step."""
        self.write(schema.Copied(step=step, pause_s=pause_s, rank=self.rank))

    def healed(self, fetched: Fetched) -> None:
        """The members' state was fetched."""
        self.write(
            schema.Healed(
                step=fetched.name.step + 1,
                bytes=fetched.nbytes,
                seconds=fetched.seconds,
                rank=self.rank,
                donors=len(fetched.by_donor),
                fingerprint=fetched.fingerprint,
            )
        )

    def rejoined(self, step: int) -> None:
        """This rank's group is a member from this step on."""
        self.write(schema.Rejoined(step=step, rank=self.rank))
        if self.rank == 0:
            say(f"lightkeeper: a member from step {step} on")

    # ------------------------------------------------------------ the rest

    def overlap(self, note: str) -> None:
        """The reducer has something to say about overlap."""
        self.write(schema.Overlap(note=note))
        say(f"lightkeeper: {note}")

    def finished(self, steps: int, digest: str) -> None:
        """The run is closed."""
        self.write(schema.Finished(step=steps, fingerprint=digest))

    def turned_away(self, line: str) -> None:
        """The transfer server refused a connection."""
        if "was refused" in line:
            self.write(schema.Unauthorised(peer="a transfer connection", what=line))
        say(f"lightkeeper: {line}")

    def settings_differ(self, step: int) -> None:
        """The members' optimizers do not have the same settings in a step; said less and less often while it lasts."""
        since = self._differ_since
        if since >= 0:
            if step >= self._differ_again:
                self._differ_again = since + 2 * (step - since)
                say(
                    f"lightkeeper: step {step}: the groups' optimizers still do NOT have the same learning rate and "
                    f"settings (since step {since}); nothing stops the run for it"
                )
            return
        self._differ_since, self._differ_again = step, step + DIFFER_AGAIN_STEPS
        self.write(schema.SettingsDiffer(step=step))
        say(
            f"lightkeeper: step {step}: the groups' optimizers do NOT have the same learning rate and settings, and go "
            "apart from here; is a scheduler, or something else that sets them, not given to manager.register()?"
        )

    def diverged(self, steps: int, digest: str) -> None:
        """The members do not hold the same state at the end."""
        self.write(schema.Diverged(step=steps, fingerprint=digest))
        say(
            f"lightkeeper: after {steps} steps the groups do NOT hold the same parameters and optimizer state (here "
            f"{digest}): something in the loop differs between groups; --fingerprint-every 1 shows since when"
        )

    def left(self, reason: str) -> None:
        """The group has left in good order."""
        self.write(schema.Left(reason=reason))

    def _stop_standing(self) -> None:
        if self._standing_since_s:
            now = time.monotonic()
            self._waited_s += now - self._standing_since_s
            self._standing_since_s = 0.0
