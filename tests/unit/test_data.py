"""The data order: pure, without replacement, resumable from a step number; the text's windows."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightkeeper.data import ByteText, DealtSampler, Schedule, TextBatches, permuted, samples

EXPECTED = [9, 6, 8, 0, 4, 1, 7, 5, 3, 2]
EXPECTED_HUGE = [427653448553020, 7551994817616634]


def ramp(step: int) -> int:
    return 1 + step // 2


def row(sampler: DealtSampler, steps: int) -> list[int]:
    """All samples of the first steps, in order."""
    return [int(i) for s in range(steps) for k in range(sampler.schedule.of(s)) for i in sampler(s, k)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 255, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**70])
def test_permutation_holds_each_number_once(n: int, seed: int) -> None:
    assert sorted(permuted(seed, np.arange(n), n)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**62), st.integers(), st.data())
def test_permutation_of_huge_sets_is_computed_place_by_place(n: int, seed: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
    found = permuted(seed, places, n)
    assert len(set(found.tolist())) == len(places)
    assert int(found.min()) >= 0
    assert int(found.max()) < n
    assert permuted(seed, places[::-1], n).tolist() == found.tolist()[::-1]


def test_permutation_looks_shuffled() -> None:
    """Not a proof of randomness: no sample near its place more often than chance, no pair kept together."""
    n = 10_000
    found = permuted(7, np.arange(n), n)
    assert np.mean(np.abs(found - np.arange(n))) == pytest.approx(n / 3, rel=0.05)
    assert np.sum(np.diff(found) == 1) < 10
    assert abs(np.corrcoef(found, np.arange(n))[0, 1]) < 0.05
    other = permuted(8, np.arange(n), n)
    assert np.sum(found == other) < 15


def test_permutation_never_changes() -> None:
    """A resumed run depends on these very numbers, over versions of this package and of numpy."""
    assert permuted(42, np.arange(10), 10).tolist() == EXPECTED
    assert permuted(42, np.array([0, 10**15]), 10**16).tolist() == EXPECTED_HUGE


def test_permutation_refuses_what_is_out_of_range() -> None:
    for positions, n in (([0], 0), ([0], 2**62 + 1), ([-1], 5), ([5], 5)):
        with pytest.raises(ValueError):
            permuted(0, np.array(positions), n)
    assert permuted(0, np.array([], dtype=np.int64), 5).size == 0


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    size=st.integers(1, 9),
    microbatches=st.integers(1, 6),
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    ramped=st.booleans(),
)
def test_each_pass_over_the_data_holds_each_sample_once(
    n: int, size: int, microbatches: int, steps: int, seed: int, ramped: bool
) -> None:
    sampler = DealtSampler(n, size, ramp if ramped else microbatches, seed)
    found = row(sampler, steps)
    assert len(found) == sampler.consumed_before(steps)
    for at in range(0, len(found) - n + 1, n):
        assert sorted(found[at : at + n]) == list(range(n))
    rest = Counter(found[len(found) // n * n :])
    assert not rest or max(rest.values()) == 1


def test_the_steps_of_whole_passes() -> None:
    """As `docs/data.md` says: the first step before which so many samples are consumed ends the run."""
    for sampler, passes in ((DealtSampler(96, 8, 4), 3), (DealtSampler(100, 7, ramp), 2)):
        until = next(s for s in itertools.count() if sampler.consumed_before(s) >= passes * sampler.n)
        times = Counter(row(sampler, until))
        assert set(times) == set(range(sampler.n)) and min(times.values()) == passes
        assert min(Counter(row(sampler, until - 1)).values()) < passes
        ends = [s for s in range(until) if int(sampler.data_epoch(s + 1)) > int(sampler.data_epoch(s))]
        assert len(ends) == passes and ends[-1] == until - 1
    assert sampler.consumed_before(until) > passes * sampler.n, "the last step reads on into the next pass"


def test_it_is_pure_and_needs_only_a_step_number() -> None:
    sampler = DealtSampler(1000, 8, ramp, seed=3)
    want = row(sampler, 20)
    fresh = DealtSampler(1000, 8, ramp, seed=3)
    at = fresh.consumed_before(13)
    assert fresh(13, 2).tolist() == want[at + 16 : at + 24]
    assert samples(3, 13, 2, ramp, 8, 1000).tolist() == fresh(13, 2).tolist()
    assert fresh(13, 2).tolist() == fresh(13, 2).tolist()


def test_another_seed_or_pass_is_another_order() -> None:
    one, other = row(DealtSampler(100, 10, 10, 0), 2), row(DealtSampler(100, 10, 10, 1), 2)
    assert one[:100] != other[:100]
    assert one[:100] != one[100:]
    assert one[100:] != other[:100], "the second pass of one seed must not be the first of the next"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_split_a_microbatch(world_size: int) -> None:
    whole = samples(5, 3, 1, 4, 8, 30)
    parts = [samples(5, 3, 1, 4, 8, 30, rank=r, world_size=world_size) for r in range(world_size)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_schedule_of_a_function_is_asked_once_per_step() -> None:
    asked: list[int] = []

    def count(step: int) -> int:
        asked.append(step)
        return step + 1

    schedule = Schedule(count)
    assert [schedule.before(step) for step in (5, 3, 5, 0)] == [15, 6, 15, 0]
    assert asked == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"k": 4}, "microbatches 0..3, got 4"),
        ({"k": -1}, "got -1"),
        ({"step": -1}, "negative"),
        ({"microbatches": 0}, "at least 1"),
        ({"microbatches": lambda step: 0}, "at least 1"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"world_size": 3}, "cannot split"),
        ({"rank": 1}, "cannot split"),
    ],
)
def test_bad_arguments_are_named(over: dict[str, object], says: str) -> None:
    arguments: dict[str, object] = {"seed": 0, "step": 0, "k": 0, "microbatches": 4, "size": 8, "n": 10}
    with pytest.raises(ValueError, match=says):
        samples(**{**arguments, **over})  # type: ignore[arg-type]


def test_sampler_needs_no_torch() -> None:
    code = "import sys, lightkeeper.data as d; d.samples(0, 0, 0, 1, 1, 1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- text


def test_windows_follow_each_other(tmp_path: Path) -> None:
    content = bytes(range(20))
    (tmp_path / "text").write_bytes(content)
    for text in (ByteText(content, 4), ByteText(tmp_path / "text", 4)):
        assert len(text) == 4
        x, y = text.take(np.array([0, 3]))
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]
        assert y.tolist() == [[1, 2, 3, 4], [13, 14, 15, 16]]
        assert text[1][0].tolist() == [4, 5, 6, 7]
        for bad in (-1, 4):
            with pytest.raises(IndexError):
                text.take(np.array([bad]))


def test_too_short_a_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for source in (b"abcd", tmp_path / "empty"):
        with pytest.raises(ValueError, match="at least 5 are needed"):
            ByteText(source, 4)
    with pytest.raises(ValueError, match="context"):
        ByteText(b"abc", 0)


def test_batches() -> None:
    text = ByteText(bytes(range(200)), 4)
    batches = TextBatches(text, DealtSampler(len(text), 6, 3))
    x, y = batches.batch(2, 1)
    assert x.shape == y.shape == (6, 4)
    assert torch.equal(x, batches.batch(2, 1)[0])
    assert not torch.equal(x, batches.batch(2, 2)[0])
    with pytest.raises(ValueError, match="the sampler deals 5"):
        TextBatches(text, DealtSampler(5, 6, 3))
