"""The nodes of a run: who is free, lost, to be left, in quarantine, or tried there. Pure, a part of the machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightkeeper.supervisor.actions import Action, BurnIn, Exclude, Note, Tell
from lightkeeper.supervisor.attribution import Blame, End
from lightkeeper.supervisor.places import Node

STRIKES_MAX = 2  # of a node that may be to blame, in one run
BURN_IN_AGAIN_S = 30.0


class Pool:
    """All nodes of one run.

    Args:
        names: of the nodes that there are.
        quarantined: node to reason, from earlier.
        burns_in: whether who is put aside is burned in.
    """

    def __init__(self, names: Iterable[str], quarantined: Mapping[str, str], burns_in: bool) -> None:
        self.nodes = defaultdict(Node, {name: Node(excluded=quarantined.get(name, "")) for name in names})
        self._burns_in = burns_in
        for node in self.nodes.values():
            node.burn_in = bool(node.excluded) and burns_in
        self._burning: set[str] = set()
        self._passed = False  # whether some node has passed preflight
        self._unsure: list[Action] = []  # what is done of nodes that failed it before one did

    def state(self) -> dict[str, Any]:
        """What the next supervisor must know of them, as JSON."""
        return {name: [node.strikes, node.failures] for name, node in self.nodes.items()}

    def take_up(self, state: Mapping[str, Any]) -> None:
        """What the supervisor before knew."""
        for name, (strikes, failures) in state.items():
            if name in self.nodes:
                self.nodes[name].strikes, self.nodes[name].failures = strikes, failures

    # ------------------------------------------------------------ who has them

    def take(self, count: int, group: str) -> tuple[str, ...]:
        """So many for a group, the best known first; none if there are not so many."""
        free = [name for name, node in self.nodes.items() if node.free]
        free.sort(key=lambda name: (self.nodes[name].strikes, self.nodes[name].failures))
        if len(free) < count:
            return ()
        self.give(free[:count], group)
        return tuple(free[:count])

    def give(self, names: Sequence[str], group: str) -> None:
        """A group has them."""
        for name in names:
            self.nodes[name].group = group

    def release(self, names: Sequence[str]) -> None:
        """No group has them."""
        self.give(names, "")

    def why_none(self) -> str:
        """Why none is free."""
        taken = {"lost": [], "to be left": [], "in quarantine": []}  # type: dict[str, list[str]]
        for name, node in self.nodes.items():
            if not node.group and not node.free:
                taken["lost" if node.lost else "to be left" if node.leaving else "in quarantine"].append(name)
        why = "; ".join(f"{state}: {', '.join(names)}" for state, names in taken.items() if names)
        return why or "all nodes have groups"

    def why_none_comes(self) -> str:
        """Why none will ever be free: all are in quarantine and stay there; "" if one may."""
        if any(node.may_come for node in self.nodes.values()):
            return ""
        return "; ".join(f"{name} ({node.excluded})" for name, node in sorted(self.nodes.items()) if node.excluded)

    # ------------------------------------------------------------ what happens to them

    def came(self, name: str) -> list[Action]:
        """A node is there, for the first time or again."""
        self.nodes[name].lost, self.nodes[name].leaving = False, ""
        return [Note("node_came", {"node": name})]

    def leaving(self, name: str, why: str) -> list[Action]:
        """A node is to be left; nothing if that is known."""
        if self.nodes[name].leaving:
            return []
        self.nodes[name].leaving = why
        return [Note("node_leaving", {"node": name, "reason": why})]

    def lost(self, name: str, why: str) -> list[Action]:
        """A node is gone; nothing if that is known."""
        if self.nodes[name].lost:
            return []
        self.nodes[name].lost = True
        return [Note("node_lost", {"node": name, "reason": why})]

    def checked(self, name: str, problem: str, evidence: str) -> list[Action]:
        """A node's preflight has ended; `problem` is empty if it is fit."""
        if problem:
            found = self._exclude(name, f"preflight: {problem}", evidence)
            if self._passed:
                return found
            self._unsure += found  # perhaps no node can pass: then it is what is asked of them, not they
            self.nodes[name].burn_in = False
            return []
        if self._passed:
            return []
        self._passed = True
        for node in self._put_aside_unsure():
            self.nodes[node].burn_in = self._burns_in
        return self._unsure

    def ended_on(self, names: Sequence[str], end: End, found: Blame, group: str) -> tuple[str, list[Action]]:
        """A group's start has failed on these nodes: on which of them, "" if nobody knows; and what is done of it."""
        for name in names:
            self.nodes[name].failures += 1
        on = end.node if end.node in names else names[0] if len(names) == 1 else ""
        if on and found.whose == "node":
            return on, self._exclude(on, found.why, end.evidence, found.kind, group)
        if on and found.whose == "maybe":
            self.nodes[on].strikes += 1
            if self.nodes[on].strikes >= STRIKES_MAX:
                why = f"{self.nodes[on].strikes} times: {found.why}"
                return on, self._exclude(on, why, end.evidence, found.kind, group)
        return on, []

    def _exclude(self, name: str, reason: str, evidence: str, cause: str = "", group: str = "") -> list[Action]:
        node = self.nodes[name]
        if node.excluded:
            return []
        node.excluded, node.burn_in = reason, self._burns_in
        noted = Note("node_quarantined", {"node": name, "reason": reason, "evidence": evidence})
        return [noted, Exclude(name, reason, evidence), Tell("quarantine", f"{name}: {reason}", evidence, cause, group)]

    def _put_aside_unsure(self) -> set[str]:
        return {one.node for one in self._unsure if isinstance(one, Exclude)}

    # ------------------------------------------------------------ who is in quarantine

    def quarantine_is(self, reasons: Mapping[str, str]) -> list[Action]:
        """Who is in quarantine, with the reason: somebody has changed it. Who is at work stays there."""
        changed: list[Action] = []
        unsure = set() if self._passed else self._put_aside_unsure()
        for name, node in self.nodes.items():
            if name in unsure or name in self._burning:
                continue
            if node.excluded and name not in reasons:
                node.excluded, node.strikes, node.burn_in = "", 0, False
                changed.append(Note("node_released", {"node": name}))
            elif name in reasons and not node.excluded:
                node.excluded = reasons[name]
                changed.append(Note("node_quarantined", {"node": name, "reason": reasons[name]}))
        return changed

    def to_burn_in(self, now: float) -> list[Action]:
        """Those whose burn-in can begin."""
        ready = [
            name for name, node in self.nodes.items()
            if node.burn_in and now >= node.burn_in_at and not (node.lost or node.group or name in self._burning)
        ]  # fmt: skip
        self._burning.update(ready)
        return [BurnIn(name) for name in ready]

    def burn_in_broke_off(self, name: str, now: float) -> None:
        """It was lost during its burn-in, or could not say how it went: it is tried again."""
        self._burning.discard(name)
        self.nodes[name].burn_in_at = now + BURN_IN_AGAIN_S

    def burned_in(self, name: str, returns: bool, why: str) -> list[Action]:
        """A burn-in has ended; whether the node gets work again, and why or why not."""
        node = self.nodes[name]
        self._burning.discard(name)
        node.burn_in = False
        if returns:
            node.excluded, node.strikes = "", 0
        return [Note("burned_in", {"node": name, "returns": returns, "reason": why})]
