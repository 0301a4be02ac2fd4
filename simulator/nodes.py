"""The nodes of a simulated group: votes folded by the real folder, and delayed on their way to the manager and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightkeeper.manager import local
from lightkeeper.manager.folding import HELD_S_MAX, Folder, Said

if TYPE_CHECKING:
    from lightkeeper.simulator.followers import Follower
    from lightkeeper.simulator.groups import GroupProcess

LINK_S = (0.0001, 0.02)  # between an agent and its manager; messages keep their order
LOOK_S = 0.1


class Node:
    """One node: the manager's own (number 0), or one with an agent.

    Args:
        group: the manager.
        number: which of its nodes.
        ranks: its ranks in the group.
    """

    def __init__(self, group: GroupProcess, number: int, ranks: range) -> None:
        self.group, self.number, self.clock = group, number, group.clock
        self._folder = Folder(ranks)
        self._up_s = self._down_s = 0.0  # when the newest message arrives

    def takes(self, rank: int, message: local.FromRank) -> None:
        """A rank says something."""
        self._hand_on(self._folder.takes(rank, message, self.clock.now))
        self.clock.after(HELD_S_MAX + LOOK_S, self._look)

    def sees_exit(self, rank: int, code: int) -> None:
        """A rank's process has ended."""
        self._hand_on(self._folder.ended(rank))
        self._up_s = self._later(self._up_s)
        self.clock.at(self._up_s, self.group.hear_exit, rank, code)

    def tell(self, rank: Follower, message: local.ToRank) -> None:
        """The manager tells a rank something."""
        self._down_s = self._later(self._down_s)
        self.clock.at(self._down_s, self._pass_on, rank, message)

    def _pass_on(self, rank: Follower, message: local.ToRank) -> None:
        if isinstance(message, local.Answer) and message.verdict != "copy":
            self._folder.answered((rank.index,))
        self.group.push(rank, message)

    def _look(self) -> None:
        self._hand_on(self._folder.due(self.clock.now))

    def _hand_on(self, said: list[Said]) -> None:
        if said:
            self._up_s = self._later(self._up_s)
            self.clock.at(self._up_s, self.group.ranks_say, said)

    def _later(self, before_s: float) -> float:
        link_s = self.clock.uniform(*LINK_S) if self.number else 0.0
        return max(before_s, self.clock.now + link_s)
