"""One folder's saves in the background: what is final counts, what never will be does not, a bug is only told."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import checkpoint_states as states
import msgspec
import pytest
import torch

from lightkeeper.checkpoint import saver as saver_module
from lightkeeper.checkpoint.content import Names
from lightkeeper.checkpoint.copies import Copies
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.manifest import Manifest, State, read_marker
from lightkeeper.checkpoint.ranks import Ranks
from lightkeeper.checkpoint.saver import Make, Outcome, Save, Saver
from lightkeeper.checkpoint.writing import Written
from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager.state.snapshot import Snapshot


class World:
    """A saver of one rank, and a state of which it saves copies."""

    def __init__(self, path: Path, keep: int = 2, ranks: Any = None) -> None:
        self.state = torch.zeros(4)
        self.registry = states.registry_of(state=self.state)
        self.copies = Copies(self.registry)
        self.folder = Folder(path, "g0-1")
        self.saver = Saver(self.folder, Names(self.registry), ranks or Ranks(1), keep)

    def begin(self, step: int, make: Make | None = None) -> Entry:
        """Begins to save a state of its own."""
        name = states.entry(step - 1)
        self.state.fill_(float(step))
        held = self.copies.begin(name, 1)
        self.copies.settle()
        usual = lambda *found: manifest_of(step, *found)  # noqa: E731
        self.saver.save(Save(name, held.take, held.give_back, {}, set(), make or usual))
        return name

    def save(self, step: int) -> Entry:
        """Begins to, and waits until that is written."""
        name = self.begin(step)
        assert self.saver.wait(time.monotonic() + 120, written=True)
        return name

    def ended(self) -> Outcome:
        """What became of the one under way."""
        assert self.saver.wait(time.monotonic() + 120)
        (outcome,) = self.saver.outcomes()
        return outcome

    def saved(self, *steps: int) -> list[Outcome]:
        """Saves states that are final."""
        found = []
        for step in steps:
            self.saver.final(self.save(step), "the next step was reduced")
            found.append(self.ended())
        return found

    def committed(self) -> list[int]:
        """Steps of those that count, newest first."""
        return [one.step for one in self.folder.listed() if one.manifest is not None]


def manifest_of(step: int, written: Written, snapshot: Snapshot) -> Manifest:
    del snapshot
    return Manifest(
        step=step, state=State(3, 1, "lh", step - 1), job="j", group="g0", incarnation="1", wall=float(step), ranks=1,
        seed=1, microbatches=step, held=written.held, files=written.files, bytes=written.bytes, loaded=written.loaded,
    )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "checkpoints")


def test_it_counts_only_once_its_state_is_final(world: World) -> None:
    name = world.save(3)
    assert world.saver.busy and not world.committed() and world.saver.busy_s == 0.0
    world.saver.final(name, "the next step was reduced")
    outcome = world.ended()
    assert outcome.path == world.folder.path / "step-00000003" and not outcome.problem and world.committed() == [3]
    assert outcome.manifest is not None and outcome.manifest.loaded
    assert read_marker(outcome.path).final == "the next step was reduced"


@pytest.mark.parametrize("how", ["done again", "healed"])
def test_what_never_becomes_final_is_dropped_and_the_next_one_counts(world: World, how: str) -> None:
    world.save(3)
    if how == "healed":
        world.saver.void()
    else:
        world.saver.final(Entry(Epoch(4, Term(1, "lh")), 2), "reduced")
    assert "done again by others" in world.ended().problem
    assert not world.committed() and not list(world.folder.path.iterdir())
    world.saved(4)
    assert world.committed() == [4]


def test_a_copy_that_is_given_is_saved_whatever_becomes_of_the_state(world: World) -> None:
    name = world.save(3)
    world.state.fill_(99.0)
    world.saver.final(name, "the next step was reduced")
    assert world.ended().manifest is not None
    back = torch.zeros(4)
    manifest = world.folder.look(3).manifest
    assert manifest is not None and states.load(world.folder.path / "step-00000003", manifest, state=back).compared
    assert back.tolist() == [3.0] * 4


def test_one_in_ten_is_loaded_and_old_ones_go(world: World) -> None:
    outcomes = world.saved(*range(1, 13))
    assert [o.manifest is not None and o.manifest.loaded for o in outcomes].count(True) == 2
    assert world.committed() == [12, 11] and [o.pruned for o in outcomes] == [0, 0] + [1] * 10


def test_nothing_goes_before_two_that_stay_were_read_here(tmp_path: Path) -> None:
    """A restart found the newest ones broken, with all their bytes there: they must not displace what was loaded."""
    World(tmp_path).saved(1, 2)
    path = next((tmp_path / "step-00000002").glob("*.distcp"))
    path.write_bytes(bytes(path.stat().st_size))
    world = World(tmp_path)
    world.folder.was_read(1)  # it was loaded
    (first,) = world.saved(3)
    assert first.pruned == 0 and world.committed() == [3, 2, 1]
    (second,) = world.saved(4)
    assert second.pruned == 2 and world.committed() == [4, 3]


def test_what_nobody_foresaw_is_told_leaves_nothing_and_the_next_one_counts(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: Any) -> Any:
        raise LookupError("nobody foresaw this")

    with monkeypatch.context() as patch:
        patch.setattr(saver_module, "write", breaks)
        world.save(3)
        assert world.ended().problem == "LookupError: nobody foresaw this"
    assert "Traceback" in capsys.readouterr().err and not list(world.folder.path.iterdir())
    assert world.saved(4)[0].manifest is not None and world.committed() == [4]


def test_a_place_that_cannot_be_written_is_told_by_its_name(world: World) -> None:
    world.folder.path.write_text("a file")
    world.save(3)
    assert world.ended().problem == f"{world.folder.path} cannot be written: File exists"
    world.folder.path.unlink()
    world.saved(4)
    assert world.committed() == [4]


class TwoRanks:
    """One of two ranks that are threads here."""

    def __init__(self, rank: int, said: list[Any], meet: threading.Barrier) -> None:
        self.group, self.rank, self.size, self.first = None, rank, 2, rank == 0
        self._said, self._meet = said, meet

    def all(self, mine: Any) -> list[Any]:
        self._said[self.rank] = mine
        self._meet.wait(120)
        said = list(self._said)
        self._meet.wait(120)
        return said


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("nobody foresaw this")])
def test_what_fails_on_one_rank_alone_is_told_on_both_and_the_next_save_is_not_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The manifest is written by rank 0 alone, when all others have done their part."""

    def writes(path: Path, snapshot: Snapshot, *_: Any) -> Written:
        return Written({}, [], False, 0.0)

    def breaks(*_: Any) -> Manifest:
        raise error

    monkeypatch.setattr(saver_module, "write", writes)
    said, meet = [None, None], threading.Barrier(2)
    worlds = [World(tmp_path, ranks=TwoRanks(rank, said, meet)) for rank in range(2)]
    for world in worlds:
        world.saver.final(world.begin(3, breaks), "the next step was reduced")
    problems = {world.ended().problem for world in worlds}
    assert len(problems) == 1 and str(error.args[-1]) in problems.pop()
    for world in worlds:
        world.saver.final(world.begin(4), "the next step was reduced")
    assert [world.ended().problem for world in worlds] == ["", ""] and worlds[0].committed() == [4]


def test_a_rank_that_is_a_save_behind_gives_it_up_and_what_counts_is_of_one_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However that came about, no folder gets the shards of two states."""
    written_by: list[tuple[int, str]] = []

    def writes(
        path: Path, snapshot: Snapshot, wholes: Any, names: Any, differing: Any, ranks: Any, load: bool
    ) -> Written:
        written_by.append((ranks.rank, str(snapshot.name)))
        return Written({}, [], False, 0.0)

    monkeypatch.setattr(saver_module, "write", writes)
    said, meet = [None, None], threading.Barrier(2)
    ahead, behind = (World(tmp_path, ranks=TwoRanks(rank, said, meet)) for rank in range(2))
    behind.begin(3)
    ahead.saver.final(ahead.begin(4), "the next step was reduced")
    end = time.monotonic() + 120
    while not (given_up := behind.saver.outcomes()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "other ranks of this group save" in given_up[0].problem
    behind.saver.final(behind.begin(4), "the next step was reduced")
    assert [world.ended().problem for world in (ahead, behind)] == ["", ""] and ahead.committed() == [4]
    assert {name for _, name in written_by} == {str(states.entry(3))} and len(written_by) == 2


def test_later_ones_of_an_earlier_life_are_put_aside_by_what_this_one_saves(tmp_path: Path) -> None:
    """Damaged, or of a history that was given up: they would displace what is saved now, and hold up what is due."""
    World(tmp_path).saved(2, 4, 6)
    world = World(tmp_path)
    world.saved(3)
    assert world.committed() == [3]  # of the earlier three two were kept
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("aside-"))
    assert names == ["aside-step-00000004", "aside-step-00000006"]


def test_what_was_saved_in_this_life_is_never_put_aside(world: World) -> None:
    """By a writer that had stood still, and comes with an earlier step now."""
    now = time.time() + 5

    def later(*found: Any) -> Manifest:
        return msgspec.structs.replace(manifest_of(8, *found), wall=now)

    world.saver.final(world.begin(8, later), "the next step was reduced")
    assert not world.ended().problem
    world.saved(7)
    assert world.committed() == [8, 7]
