"""Learning when a bucket may be reduced."""

from __future__ import annotations

from lightkeeper.manager.overlap import WINDOW_FIRST, Overlap


def run_step(overlap: Overlap, *microbatches: list[int], computed: bool = True) -> list[tuple[bool, ...]]:
    """Fire hooks microbatch by microbatch; which of two buckets are ready after each firing of the last."""
    overlap.begin_step()
    seen = []
    for m, firings in enumerate(microbatches):
        overlap.begin_microbatch(m == len(microbatches) - 1)
        seen = []
        for i in firings:
            overlap.fire(i)
            seen.append(tuple(overlap.ready(b) for b in range(2)))
    overlap.stop()
    overlap.end_step(computed)
    return seen


def overlap() -> Overlap:
    return Overlap([0, 0, 1], 2)  # parameters 0 and 1 in bucket 0, 2 in bucket 1


NOTHING, FIRST, BOTH = (False, False), (True, False), (True, True)


def test_nothing_is_ready_before_the_window_is_full():
    o = overlap()
    for _ in range(WINDOW_FIRST):
        assert not o.learnt
        assert run_step(o, [0, 1, 2]) == [NOTHING] * 3
    assert o.learnt
    assert run_step(o, [0, 1, 2]) == [NOTHING, FIRST, BOTH]


def test_only_the_last_microbatch_counts():
    o = overlap()
    for _ in range(2):
        run_step(o, [0, 1, 2], [0, 0, 1, 2])
    assert run_step(o, [0, 1, 2], [0, 1, 0, 2]) == [NOTHING, NOTHING, FIRST, BOTH]


def test_a_parameter_that_never_fires_is_not_waited_for():
    o = overlap()
    for _ in range(2):
        run_step(o, [0, 2])
    assert run_step(o, [0, 2]) == [FIRST, BOTH]


def test_steps_without_microbatches_teach_nothing():
    o = overlap()
    run_step(o, [0, 1, 2])
    for _ in range(3):
        run_step(o, computed=False)
    assert not o.learnt
    run_step(o, [0, 1, 2])
    assert o.learnt


def test_fewer_firings_are_adopted_once_the_window_has_only_them():
    o = overlap()
    for _ in range(2):
        run_step(o, [0, 1, 2])
    assert run_step(o, [0, 2]) == [NOTHING, (False, True)]
    run_step(o, [0, 2])
    assert run_step(o, [0, 2]) == [FIRST, BOTH]


def test_forgetting_looks_twice_as_long():
    o = overlap()
    for _ in range(2):
        run_step(o, [0, 1, 2])
    o.forget()
    for _ in range(2 * WINDOW_FIRST):
        assert not o.learnt
        run_step(o, [0, 1, 2])
    assert o.learnt


def test_expected_firings():
    o = overlap()
    assert not o.expects_firings
    run_step(o, [])
    assert not o.expects_firings and not o.fired_in_step
    o = overlap()
    run_step(o, [2])
    assert o.expects_firings and o.fired_in_step
