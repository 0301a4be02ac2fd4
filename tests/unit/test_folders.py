"""Folders of groups that were killed are removed by the next manager, and nothing else is."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightkeeper.manager import folders


def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@pytest.fixture
def parent() -> Path:
    with tempfile.TemporaryDirectory() as name:  # shorter than pytest's: a socket's path is bounded
        yield Path(name)


def left_by(parent: Path, pid: int, listens: bool = False, name: str = "abcd_123") -> tuple[Path, socket.socket]:
    folder = parent / f"lightkeeper-{pid}-{name}"
    folder.mkdir()
    (folder / "progress-0").write_bytes(b"x")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(folder / folders.SOCKET))
    if listens:
        sock.listen()
    os.utime(folder, (0, 0))
    return folder, sock


def test_what_a_killed_group_left_is_removed(parent: Path) -> None:
    folder, sock = left_by(parent, dead_pid())
    sock.close()
    (folder / "logs").mkdir()
    (folder / "logs" / "0.log").write_text("x")
    os.utime(folder, (0, 0))
    without_socket = parent / f"lightkeeper-{dead_pid()}-abcd_124"
    without_socket.mkdir()
    os.utime(without_socket, (0, 0))
    assert sorted(folders.remove_left_over(parent)) == sorted([folder, without_socket])
    assert list(parent.iterdir()) == []


def test_a_group_that_lives_keeps_its_folder(parent: Path) -> None:
    mine, a = left_by(parent, os.getpid())
    answering, b = left_by(parent, dead_pid(), listens=True)
    a.close()
    assert folders.remove_left_over(parent) == []
    assert (mine / "progress-0").exists() and (answering / "progress-0").exists()
    b.close()
    assert folders.remove_left_over(parent) == [answering]


def test_a_folder_that_was_just_made_is_left_alone(parent: Path) -> None:
    folder, sock = left_by(parent, dead_pid())
    sock.close()
    os.utime(folder)
    assert folders.remove_left_over(parent) == []
    assert folders.remove_left_over(parent, age_s_min=0.0) == [folder]


def test_links_and_other_names_are_left_alone(parent: Path, tmp_path: Path) -> None:
    target = tmp_path / f"lightkeeper-{dead_pid()}-abcd_123"
    target.mkdir()
    (target / "precious").write_text("x")
    os.utime(target, (0, 0))
    (parent / target.name).symlink_to(target)
    for name in (
        "lightkeeper-abcd_123",
        "lightkeeper-logs-abcd_123",
        f"other-{dead_pid()}-abcd_123",
        "lightkeeper-0-abcd_123",
    ):
        (parent / name).mkdir()
        os.utime(parent / name, (0, 0))
    file = parent / f"lightkeeper-{dead_pid()}-abcd_125"
    file.write_text("x")
    os.utime(file, (0, 0))
    folder, sock = left_by(parent, dead_pid(), name="abcd_126")
    sock.close()
    (folder / "inner").symlink_to(target)
    os.utime(folder, (0, 0))
    assert folders.remove_left_over(parent) == [folder]
    assert len(list(parent.iterdir())) == 6 and (target / "precious").exists()


def test_what_is_somebody_elses_is_left_alone(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, sock = left_by(parent, dead_pid())
    sock.close()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert folders.remove_left_over(parent) == []


def test_a_new_folder_is_named_after_its_process(monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    made = folders.make_folder()
    assert made.parent == parent and made.name.startswith(f"lightkeeper-{os.getpid()}-")
    os.utime(made, (0, 0))
    assert folders.remove_left_over() == [], "its process lives"
    assert folders._NAME.fullmatch(made.name)


def test_a_folder_without_room_is_none(monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(folders.FolderNotMade, match=f"for the group in {parent}: No space left on device"):
        folders.make_folder()
    assert list(parent.iterdir()) == []
