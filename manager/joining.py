"""A joiner's side: fetch the members' state, then their entries one after another."""

from __future__ import annotations

import time

from lightkeeper.errors import ToldError
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager import local
from lightkeeper.manager.groups import Note
from lightkeeper.manager.reducer import Outcome, Reducer
from lightkeeper.manager.state.registry import StateRegistry
from lightkeeper.manager.state.restore import StateDoesNotFit
from lightkeeper.manager.transfer.client import NotYet, StartOver, TransferFailed, fetch_after
from lightkeeper.manager.transfer.joiner import Fetched, Options, fetch_state

ASK_AGAIN_S = 0.05
WAIT_S = 0.5  # at a donor for the next entry, before the manager is asked whether anything changed


class CannotHeal(ToldError):
    """The members' state is not one that this group could hold."""


class Joiner:
    """Heals this rank.

    Args:
        token: the job's token.
        registry: what is replaced.
        timeout_s: bound on one transfer, and on the wait for donors to reach their boundary.
        note: told one line about the transfer.
    """

    def __init__(self, token: str, registry: StateRegistry, timeout_s: float, note: Note) -> None:
        self._token, self._registry, self._timeout_s, self._note = token, registry, timeout_s, note
        self._donors: list[str] = []
        self._source = local.Source(step=0, donors=())

    def fetch(self, source: local.Source) -> Fetched:
        """Replaces the state by the donors' copy, once they have reached the boundary.

        Raises:
            TransferFailed: if it cannot be had whole.
            CannotHeal: if it does not fit, naming what does not.
        """
        self._source = source
        until = time.monotonic() + self._timeout_s
        while True:
            source, late = self._source, time.monotonic() > until
            self._donors = [address for _, address in source.donors]
            try:
                options = Options(timeout_s=self._timeout_s, from_step=0 if late else source.step)
                return fetch_state(self._donors, self._token, self._registry, None, options, note=self._note)
            except StartOver:
                if late:
                    raise
                time.sleep(ASK_AGAIN_S)  # they have not reached the boundary yet, or hold that of an earlier one
            except StateDoesNotFit as error:
                raise CannotHeal(f"this group cannot take the members' state: {error}") from error

    def instead(self, source: local.Source) -> None:
        """The donors copy at another boundary than the one that `fetch` waits for; from any thread."""
        self._source = source

    def next_entry(self, after: Entry, reducer: Reducer, wait_s: float) -> tuple[Entry, Outcome] | None:
        """Reads the entry that follows into the reducer, from the first donor that has it.

        Args:
            after: the newest entry in the state here.
            reducer: into whose buffers it goes.
            wait_s: how long the donor waits for an entry that is not there yet.

        Returns:
            Its name and outcome; None if there is none yet.

        Raises:
            TransferFailed: if no donor will ever have it.
        """
        failure: TransferFailed | None = None
        for address in tuple(self._donors):
            try:
                name = fetch_after(
                    address, self._token, after, reducer.pending_buffers(), self._timeout_s, wait_s=wait_s
                )
                return name, reducer.adopt()
            except NotYet:
                return None
            except TransferFailed as error:
                failure = error
                self._donors.append(self._donors.pop(0))
        raise failure or TransferFailed("no donor is left")
