"""How the first rank of a node tells the others where their manager listens, where no launcher told them all.

They meet at the store of torch's own process group. torchrun keeps that store while it starts its ranks again, so what
ranks before these left is still there, and nothing in the environment tells the two apart: TORCHELASTIC_RESTART_COUNT
counts what one node's torchrun did. So each asks under a name made up just now, and only a living one answers to it.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from lightkeeper.errors import ToldError
from lightkeeper.words import say

PREFIX = "lightkeeper"
LOOK_S = 0.02
LOOK_S_MAX = 0.5  # a store's own wait prints warnings when it ends, and lets nobody else of this process to the store
SAY_AFTER_S = 5.0


class NotMet(ToldError):
    """The ranks of a node did not find each other; the message says who is missing."""


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""


def tell(store: Store, path: Path, ranks: Sequence[int], timeout_s: float) -> None:
    """Answers every one of these ranks; returns when all have thanked.

    Args:
        store: of the group.
        path: the socket of this node's manager or agent.
        ranks: the other ranks of this node.
        timeout_s: bound on all of it, in seconds.

    Raises:
        NotMet: one does not come, or the store is gone.
    """
    me, answered, missing = secrets.token_hex(8), dict[int, str](), set(ranks)
    began_s, say_after_s = time.monotonic(), SAY_AFTER_S
    while missing:
        try:
            missing = {rank for rank in missing if not _answer(store, rank, me, path, answered)}
        except RuntimeError as error:
            raise NotMet(f"the store of torch's process group is gone: {error}") from error
        waited_s = time.monotonic() - began_s
        if waited_s > timeout_s:
            raise NotMet(
                f"{_named(missing)} made no lightkeeper.Manager within {timeout_s:.0f} s, as their node's first did"
            )
        if waited_s > say_after_s:
            say_after_s = 2 * waited_s
            say(f"lightkeeper: waits for {_named(missing)} to make a lightkeeper.Manager since {waited_s:.0f} s")
        if missing:
            time.sleep(LOOK_S)


def _answer(store: Store, rank: int, me: str, path: Path, answered: dict[int, str]) -> bool:
    """Answers the newest name under which a rank has asked; whether the rank has thanked for it."""
    asked = f"{PREFIX}/asks/{rank}"
    if not store.check([asked]):
        return False
    name = store.get(asked).decode()
    if answered.get(rank) != name:
        answered[rank] = name
        store.set(f"{PREFIX}/answer/{name}", f"{me} {socket.gethostname()} {path}")
    return store.check([f"{PREFIX}/thanks/{name}/{me}"])


def ask(store: Store, rank: int, leader: int, timeout_s: float) -> Path:
    """The socket of this node's manager or agent, from the rank that started it.

    Args:
        store: of the group.
        rank: this one.
        leader: the one that answers.
        timeout_s: bound on all of it, in seconds.

    Raises:
        NotMet: no answer comes, the store is gone, or the answer is another machine's.
    """
    name, until, pause_s = secrets.token_hex(16), time.monotonic() + timeout_s, LOOK_S
    answer = f"{PREFIX}/answer/{name}"
    try:
        store.set(f"{PREFIX}/asks/{rank}", name)
        while not store.check([answer]):
            if time.monotonic() > until:
                raise NotMet(f"rank {leader} made no lightkeeper.Manager within {timeout_s:.0f} s, as rank {rank} did")
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, LOOK_S_MAX)
        me, host, path = store.get(answer).decode().split(" ", 2)
        store.set(f"{PREFIX}/thanks/{name}/{me}", "")
    except RuntimeError as error:
        raise NotMet(f"the store of torch's process group is gone: {error}") from error
    if not Path(path).exists():
        raise NotMet(
            f"rank {rank} on {socket.gethostname()} does not see the socket {path} of rank {leader} on {host}: ranks "
            "of one node share its folder of temporary files; if there are several nodes, LOCAL_WORLD_SIZE must say so"
        )
    return Path(path)


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
