"""Where the lighthouse may be: what is read, what is refused and named, and what is tried next."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.manager.addresses import Addresses, read_addresses
from lightkeeper.manager.settings import Settings


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", ("a:1",)),
        ("a:1,b:2", ("a:1", "b:2")),
        (" a:1 , [::1]:2 ", ("a:1", "[::1]:2")),
    ],
)
def test_one_or_several(text: str, addresses: tuple[str, ...]) -> None:
    assert read_addresses(text) == addresses


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:1,nowhere", "'nowhere' is not an address of the form HOST:PORT"),
        ("a:1,,b:2", "'' is not an address of the form HOST:PORT"),
        ("a:1,http://b:2", "'http://b:2' is a URL"),
        ("a:1,b:0", "'b:0' has no port"),
        ("a:1,b:2,a:1", "names an address twice"),
        ("a:1,b:1,c:1,d:1,e:1,f:1", "names 6 addresses; give at most 5"),
        ("file:", "'file:' names no file"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_line_that_names_it(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings(lighthouse=text, token="t")
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("lighthouse", ["a:1,b:2", "file:/somewhere"])
def test_a_start_window_needs_one_fixed_lighthouse(lighthouse: str) -> None:
    with pytest.raises(UsageError, match="start_window_s needs one lighthouse at a fixed address"):
        Settings(lighthouse=lighthouse, token="t", groups=2, start_window_s=1.0)
    Settings(lighthouse="a:1", token="t", groups=2, start_window_s=1.0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xff\xfe", "it is not text"),
        (b"a:1\nnowhere\n", "'nowhere' is not an address"),
        (b"a:1\n" * 2000, "is longer than 4096 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_at_the_start(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "at"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=says) as caught:
        Addresses(f"file:{file}", print)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", ["a:1,b:2", "a:1\nb:2\n", "a:1,\n b:2,"])
def test_a_file_holds_one_a_line_or_a_list(content: str, tmp_path: Path) -> None:
    (tmp_path / "at").write_text(content)
    assert read_addresses(f"file:{tmp_path / 'at'}") == ("a:1", "b:2")


def test_a_file_is_read_again_and_its_last_good_content_counts(tmp_path: Path) -> None:
    file, said = tmp_path / "at", list[str]()
    file.write_text("a:1")
    addresses = Addresses(f"file:{file}", said.append)
    file.write_text("b:2")
    addresses.read()
    assert addresses.at == "b:2" and not said
    for content in ("", "", "nowhere", ""):
        file.write_text(content)
        addresses.read()
        assert addresses.all == ("b:2",)
    assert [line.partition("; ")[2] for line in said] == ["going on with b:2"] * 3, "once for each thing that is wrong"
    file.unlink()
    addresses.read()
    assert "No such file" in said[-1]
    file.write_text("b:2,c:3")
    addresses.read()
    assert addresses.at == "b:2", "it goes on where it was"


def test_they_are_tried_in_a_circle_and_know_their_place() -> None:
    addresses = Addresses("a:1,b:2,c:3", print)
    seen = []
    for _ in range(4):
        seen.append((addresses.at, addresses.place))
        addresses.next()
    assert seen == [("a:1", 1), ("b:2", 2), ("c:3", 3), ("a:1", 1)]
    assert Addresses("a:1", print).place == 0


def test_a_pipe_or_a_folder_is_no_file_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="cannot read .*: it is no regular file"):
            read_addresses(f"file:{path}")
    with pytest.raises(ValueError, match="'file:' names no file"):
        read_addresses("file:")


def test_a_mount_that_hangs_is_told_of_once_and_asked_by_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, said, let_go, opened = tmp_path / "at", list[str](), threading.Event(), list[str]()
    file.write_text("a:1")
    addresses = Addresses(f"file:{file}", said.append)

    def hangs(path: Path) -> bytes:
        opened.append(str(path))
        assert let_go.wait(30)
        return b"b:2"

    monkeypatch.setattr("lightkeeper.manager.addresses._content", hangs)
    monkeypatch.setattr("lightkeeper.manager.addresses.READ_S_MAX", 0.05)
    for _ in range(3):
        addresses.read()
    assert addresses.all == ("a:1",) and len(opened) == 1
    assert len(said) == 1 and "has not answered" in said[0] and "going on with a:1" in said[0]
    let_go.set()
    monkeypatch.setattr("lightkeeper.manager.addresses.READ_S_MAX", 30.0)
    addresses.read()
    assert addresses.all == ("b:2",)
