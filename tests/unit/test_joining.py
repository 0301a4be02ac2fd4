"""What a joiner waits for, and that it can be told of another boundary meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager import joining, local
from lightkeeper.manager.transfer.client import StartOver
from lightkeeper.manager.transfer.joiner import Fetched


def source(step: int, *addresses: str) -> local.Source:
    return local.Source(step=step, donors=tuple((f"g{i}", address) for i, address in enumerate(addresses)))


def test_another_boundary_is_taken_instead_of_the_one_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its donors stand at step 5, and will never reach the boundary before step 9."""
    joiner = joining.Joiner("t", None, 60.0, lambda line: None)  # type: ignore[arg-type]
    asked: list[tuple[list[str], int]] = []
    held = Fetched(Entry(Epoch(2, Term(1, "lh")), 4), "f", 1, 0.1, {}, {}, 0)

    def fetch(donors: Sequence[str], *given: Any, **_: Any) -> Fetched:
        asked.append((list(donors), given[3].from_step))
        if given[3].from_step > 5:
            if len(asked) == 3:
                joiner.instead(source(5, "b:1"))
            raise StartOver("no such copy here yet")
        return held

    monkeypatch.setattr(joining, "fetch_state", fetch)
    monkeypatch.setattr(joining, "ASK_AGAIN_S", 0.0)
    assert joiner.fetch(source(9, "a:1", "b:1")) is held
    assert asked == [(["a:1", "b:1"], 9)] * 3 + [(["b:1"], 5)]
