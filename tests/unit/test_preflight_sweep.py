"""Who is slow, over generated matrices: a pair is as fast as the slower of its two, or as the link between them."""

from __future__ import annotations

from itertools import combinations

import pytest

from lightkeeper.supervisor.preflight import sweep
from lightkeeper.supervisor.preflight.sweep import Pair, Sweep

FAST, SLOW = 10.0, 2.0


def swept(nodes: int, slow: set[int], links: frozenset[Pair] = frozenset(), floor: float | None = None) -> Sweep:
    """As the nodes do it: round by round, until nobody is in doubt."""
    measured: dict[Pair, float] = {}
    waves = sweep.neighbours(range(nodes))
    for number in range(1, sweep.ROUNDS_MAX + 1):
        for wave in waves:
            assert len({node for pair in wave for node in pair}) == 2 * len(wave), "somebody is in two pairs at once"
            for pair in wave:
                assert pair not in measured, "nobody gets a partner again"
                noise = 1 + 0.1 * ((7 * pair[0] + 3 * pair[1]) % 5) / 5
                measured[pair] = noise * (SLOW if slow & set(pair) or pair in links else FAST)
        if number >= 2 and sweep.settled(measured, floor):
            break
        waves = sweep.next_round(range(nodes), measured, floor)
    return sweep.judge(measured, floor)


@pytest.mark.parametrize("floor", [None, 8.0])
@pytest.mark.parametrize("nodes", range(3, 17))
def test_one_slow_node_is_named_and_nobody_else(nodes: int, floor: float | None) -> None:
    for slow in range(nodes):
        found = swept(nodes, {slow}, floor=floor)
        assert (found.nodes, found.links, found.unclear) == ((slow,), (), ()), slow
        assert found.line() == f"node {slow} is slow with every partner"
        assert [node for node in range(nodes) if found.named(node)] == [slow]


@pytest.mark.parametrize("nodes", range(2, 17))
def test_nobody_is_named_where_nobody_is_slow(nodes: int) -> None:
    assert swept(nodes, set()).line() == swept(nodes, set(), floor=8.0).line() == "no pair is slow"


def test_of_two_nodes_nobody_can_say_which_is_slow() -> None:
    found = swept(2, {1}, floor=8.0)
    assert found.line() == "node 0, node 1 or the link between them is slow"
    assert found.named(0) and found.named(1)


@pytest.mark.parametrize("floor", [None, 8.0])
@pytest.mark.parametrize("nodes", range(5, 17))
def test_two_slow_nodes_are_named(nodes: int, floor: float | None) -> None:
    for slow in combinations(range(nodes), 2):
        found = swept(nodes, set(slow), floor=floor)
        assert (found.nodes, found.links, found.unclear) == (slow, (), ()), slow


def test_two_slow_nodes_of_four_are_named_by_a_floor() -> None:
    for slow in combinations(range(4), 2):
        assert swept(4, set(slow), floor=8.0).nodes == slow


@pytest.mark.parametrize("nodes", range(4, 17))
def test_one_slow_link_is_no_slow_node(nodes: int) -> None:
    """Of the links that the first round tries."""
    for wave in sweep.neighbours(range(nodes)):
        for link in wave:
            found = swept(nodes, set(), frozenset({link}))
            assert (found.nodes, found.links, found.unclear) == ((), (link,), ()), link
            assert found.line() == f"the link between {link[0]} and {link[1]} is slow"
            assert not any(found.named(node) for node in range(nodes))


def test_where_all_are_below_the_floor_nobody_is_let_off() -> None:
    assert swept(4, {0, 1, 2, 3}, floor=8.0).nodes == (0, 1, 2, 3)
    assert swept(4, {0, 1, 2, 3}).line() == "no pair is slow"  # without a floor nothing is known


def test_a_pair_that_did_not_get_done_is_slow() -> None:
    found = sweep.judge({(0, 1): 10.0, (2, 3): 0.0, (0, 2): 9.0, (1, 3): 0.0})
    assert found.nodes == (3,)
