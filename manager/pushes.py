"""What the manager pushes to a rank: to its process groups, to what is held for joiners, and to what is kept of it."""

from __future__ import annotations

from collections.abc import Callable

from lightkeeper.manager import local
from lightkeeper.manager.entries import EntryHolder
from lightkeeper.manager.epochs import Epochs
from lightkeeper.manager.evidence.handler import RankEvidence
from lightkeeper.manager.joining import Joiner


class PushesTo:
    """See `client.Pushes`."""

    def __init__(
        self,
        epochs: Epochs,
        entries: EntryHolder,
        joiner: Joiner,
        abort: Callable[[int, str], None],
        evidence: RankEvidence,
    ) -> None:
        self._epochs, self._evidence, self._abort = epochs, evidence, abort
        self.instead = joiner.instead
        self.touch, self.release = entries.touch, entries.release

    def abort(self, below: int, reason: str) -> None:
        """See `client.Pushes`. What the flight recorder holds is taken before, and written after."""
        kept = self._evidence.recorded() if self._epochs.any_below(below) else b""
        self._abort(below, reason)
        self._evidence.keep(kept)

    def build(self, plan: local.Plan) -> None:
        """See `client.Pushes`."""
        self._epochs.build(plan)
        self._evidence.note_groups()
