"""A folder of checkpoints: what counts, two writers of one step, what stands in the way, and what is deleted."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint_made import FINAL, published, written

from lightkeeper.checkpoint import folder as folder_module
from lightkeeper.checkpoint.files import check_files
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.manifest import Damaged, Manifest, read_committed
from lightkeeper.checkpoint.names import MANIFEST, MARKER, step_name


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints", "g0-1")


@pytest.fixture
def other(tmp_path: Path) -> Folder:
    """The same one, as another writer has it."""
    return Folder(tmp_path / "checkpoints", "g1-2")


def names(folder: Folder) -> list[str]:
    return sorted(os.listdir(folder.path))


def whole(path: Path) -> Manifest:
    manifest = read_committed(path)
    check_files(path, manifest)
    return manifest


def damage(path: Path) -> None:
    """Turns a bit, which no size tells."""
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[3] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


# ---------------------------------------------------------------- reading


def test_a_folder_that_is_not_there_is_empty(folder: Folder) -> None:
    assert (folder.entries(), folder.listed(), folder.newest(), folder.was_used()) == ([], [], -1, False)
    assert (folder.prune(2), folder.sweep(10**9), folder.put_aside(0)) == ([], [], [])
    assert not folder.path.exists()


def test_what_counts_is_listed_newest_first_and_the_rest_with_its_reason(folder: Folder) -> None:
    for step in (9, 10, 11, 100_000_000):
        published(folder, step)
    (folder.path / step_name(11) / MARKER).unlink()
    (folder.path / step_name(10) / MANIFEST).write_bytes(b"")
    (folder.path / step_name(12)).mkdir()
    (folder.path / step_name(13)).write_bytes(b"a file")
    shutil.copytree(folder.path / step_name(9), folder.path / step_name(14))  # by hand, under another step's name
    (folder.path / "step-15").mkdir()
    (folder.path / "notes.txt").write_bytes(b"mine")
    written(folder, 16)
    assert [(one.step, one.manifest is not None, one.reason) for one in folder.listed()] == [
        (100_000_000, True, ""),
        (14, False, "its manifest is that of step 9"),
        (13, False, "its commit marker cannot be read: Not a directory"),
        (12, False, "it has no commit marker"),
        (11, False, "it has no commit marker"),
        (10, False, "its manifest is empty"),
        (9, True, ""),
    ]
    assert [one.name for one in folder.entries() if one.kind == "alien"] == ["notes.txt", "step-15"]
    assert folder.newest() == 100_000_000
    shutil.rmtree(folder.path / step_name(100_000_000))
    assert folder.newest() == 9


def test_a_folder_was_used_once_something_was_committed_whatever_became_of_it(folder: Folder) -> None:
    written(folder, 5)
    assert not folder.was_used()
    (path,) = published(folder, 5)
    damage(path)
    (path / MARKER).write_bytes(b"torn")
    assert folder.was_used()
    (path / MARKER).unlink()
    assert folder.was_used()
    folder.put_aside(0)
    assert folder.was_used() and folder.newest() == -1


# ---------------------------------------------------------------- two writers


def test_of_two_writers_of_one_state_one_counts_and_the_other_is_dropped(folder: Folder, other: Folder) -> None:
    first, second = written(folder, 8, wall=100.0), written(other, 8, wall=101.0)
    target = folder.publish(first, FINAL)
    assert other.publish(second, FINAL) == target
    assert names(folder) == [step_name(8)]
    assert whole(target).group == "g0"


def test_of_two_states_of_one_step_the_later_counts_whoever_comes_first(folder: Folder, other: Folder) -> None:
    """Steps done again after a restart from an earlier checkpoint, while the old job's writer only stood still."""
    old, new = written(folder, 8, epoch=4, wall=100.0), written(other, 8, epoch=2, wall=900.0)
    target = other.publish(new, FINAL)
    assert folder.publish(old, FINAL) == target
    assert names(folder) == [step_name(8)] and whole(target).state.epoch == 2

    published(folder, 9, epoch=4, wall=100.0)
    target = other.publish(written(other, 9, epoch=2, wall=900.0), FINAL)
    assert names(folder) == [step_name(8), step_name(9)] and whole(target).state.epoch == 2


@pytest.mark.parametrize("before", ["write_whole", "rename", "fsync_folder"])
def test_a_writer_that_stands_still_spoils_nothing(
    folder: Folder, other: Folder, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Before its marker, its rename, or what follows that: meanwhile somebody else publishes the newer one."""
    old, new = written(folder, 8, epoch=4, wall=100.0), written(other, 8, epoch=6, wall=900.0)
    holder: Any = Path if before == "rename" else folder_module
    go_on, waiting = getattr(holder, before), [new]

    def stand_still(*arguments: Any) -> Any:
        if waiting:
            other.publish(waiting.pop(), FINAL)
        return go_on(*arguments)

    monkeypatch.setattr(holder, before, stand_still)
    target = folder.publish(old, FINAL)
    assert not waiting and whole(target).state.epoch == 6
    assert names(folder) == [step_name(8)]


def test_many_writers_of_one_step_at_once_leave_one_that_is_whole(folder: Folder) -> None:
    writers = [Folder(folder.path, f"g{number}-1") for number in range(4)]
    ready = [written(writer, 8, epoch=number // 2 + 1, wall=100.0 + number) for number, writer in enumerate(writers)]
    start, failed = threading.Barrier(4), []

    def publish(writer: Folder, path: Path) -> None:
        start.wait(10)
        try:
            writer.publish(path, FINAL)
        except OSError as error:  # the name was taken again and again: then it stays where it was
            failed.append((path, error))

    threads = [threading.Thread(target=publish, args=pair) for pair in zip(writers, ready, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert whole(folder.path / step_name(8)).state.epoch in (1, 2)
    assert all(path.exists() and "another writer" in str(error) for path, error in failed)
    assert {one.kind for one in folder.entries()} <= {"step", "saving"} and len(failed) <= 2


# ---------------------------------------------------------------- what stands in the way


def no_marker(path: Path) -> None:
    (path / MARKER).unlink()


def no_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"not a folder")


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("nowhere"))


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize("spoil", [damage, no_marker, no_manifest, a_file, a_link, empty])
def test_what_is_broken_makes_place_also_for_an_older_copy(folder: Folder, other: Folder, spoil: Any) -> None:
    (path,) = published(other, 8, wall=900.0)
    spoil(path)
    target = folder.publish(written(folder, 8, wall=100.0), FINAL)
    assert target == path and whole(target).group == "g0"
    assert [name for name in names(folder) if name != "elsewhere"] == [step_name(8)]


def test_what_is_no_checkpoint_is_not_published(folder: Folder) -> None:
    path = folder.saving(8)
    with pytest.raises(Damaged, match="it has no manifest"):
        folder.publish(path, FINAL)
    assert names(folder) == [path.name] and not (path / MARKER).exists()


def test_a_second_try_of_one_writer_starts_from_nothing(folder: Folder) -> None:
    path = written(folder, 8)
    assert folder.saving(8) == path and os.listdir(path) == []


def test_a_folder_that_cannot_be_written_is_an_error_and_spoils_nothing(folder: Folder, tmp_path: Path) -> None:
    published(folder, 7)
    path = written(folder, 8)
    (path / MARKER).mkdir()  # stands for a storage that takes no more
    with pytest.raises(OSError):
        folder.publish(path, FINAL)
    assert folder.newest() == 7 and sorted(os.listdir(path)) == [".metadata", MARKER, "__0_0.distcp", MANIFEST]
    (path / MARKER).rmdir()  # and now it does
    folder.publish(path, FINAL)
    assert folder.newest() == 8
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        Folder(tmp_path / "file" / "checkpoints").saving(1)
    with pytest.raises(NotADirectoryError):
        Folder(tmp_path / "file").listed()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_the_right_to_write(folder: Folder) -> None:
    published(folder, 1, 2, 3, 4)
    folder.path.chmod(0o555)
    try:
        for change in (lambda: folder.saving(5), lambda: folder.prune(2), lambda: folder.put_aside(1)):
            with pytest.raises(PermissionError):
                change()
    finally:
        folder.path.chmod(0o755)
    assert [one.step for one in folder.listed() if one.manifest] == [4, 3, 2, 1]


# ---------------------------------------------------------------- deleting


def test_prune_keeps_the_newest_that_have_their_files_and_never_fewer_than_two(folder: Folder) -> None:
    published(folder, *range(1, 8))
    (folder.path / step_name(7) / "__0_0.distcp").unlink()  # is no good, so it is none of those that stay
    (folder.path / step_name(5) / MARKER).unlink()
    (folder.path / step_name(1) / MARKER).unlink()
    assert [path.name for path in folder.superfluous(3)] == [step_name(step) for step in (1, 2)]
    assert len(names(folder)) == 7
    assert [path.name for path in folder.prune(3)] == [step_name(step) for step in (1, 2)]
    for keep in (2, 1, 0, -5):
        folder.prune(keep)
        assert names(folder) == [step_name(step) for step in (4, 5, 6, 7)]


def test_prune_deletes_nothing_while_there_are_fewer(folder: Folder) -> None:
    published(folder, *range(1, 6))
    for step in (2, 3, 4):
        (folder.path / step_name(step) / ".metadata").write_bytes(b"short")
    assert folder.prune(3) == [] and folder.superfluous(2) == []
    (folder.path / step_name(1) / MANIFEST).unlink()
    assert folder.prune(2) == [] and len(names(folder)) == 5


def test_prune_keeps_every_so_many_steps(folder: Folder) -> None:
    published(folder, *range(0, 100, 10))
    folder.prune(2, keep_every=40)
    assert names(folder) == [step_name(step) for step in (0, 40, 80, 90)]


def test_prune_leaves_alone_what_is_not_its_own(folder: Folder, other: Folder) -> None:
    published(folder, 1, 2, 3)
    written(other, 1)
    (folder.path / "notes.txt").write_bytes(b"mine")
    (folder.path / "aside-step-00000001").mkdir()
    folder.prune(2)
    assert names(folder) == [
        ".saving-00000001.g1-2", "aside-step-00000001", "notes.txt", step_name(2), step_name(3),
    ]  # fmt: skip


def test_sweep_removes_what_broke_off_up_to_a_step(folder: Folder, other: Folder) -> None:
    published(folder, 5)
    mine, theirs = written(folder, 5), written(other, 5)
    later = written(other, 6)
    dropped = folder.path / ".dropped-step-00000001.ab"
    dropped.mkdir()
    (dropped / "x").write_bytes(b"x")
    (folder.path / ".dropped-file.cd").write_bytes(b"x")
    assert set(folder.sweep(5, mine=False)) == {theirs, dropped, folder.path / ".dropped-file.cd"}
    assert folder.sweep(5, mine=True) == [mine]
    assert names(folder) == [later.name, step_name(5)]


def test_put_aside_keeps_them_and_they_no_longer_count(folder: Folder) -> None:
    published(folder, 1, 2, 3)
    moved = folder.put_aside(1)
    assert [path.name for path in moved] == ["aside-step-00000003", "aside-step-00000002"]
    assert folder.newest() == 1 and folder.prune(2) == []
    published(folder, 2, epoch=9)
    assert [path.name for path in folder.put_aside(1)] == ["aside-step-00000002.2"]
    assert whole(folder.path / "aside-step-00000002").state.epoch == 1
    assert whole(folder.path / "aside-step-00000002.2").state.epoch == 9
    assert folder.put_aside(1) == []
