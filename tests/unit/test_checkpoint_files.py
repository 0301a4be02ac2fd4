"""A checkpoint by itself: its names, its manifest and marker, its files; and what is found of one that was torn."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import msgspec
import pytest
from checkpoint_made import FINAL, published, written

from lightkeeper.checkpoint import names
from lightkeeper.checkpoint.files import check_files, data_files, measured, write_whole
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.manifest import FORMAT, Damaged, Manifest, read_committed, read_manifest
from lightkeeper.checkpoint.names import MANIFEST, MARKER


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints", "g0-1")


@pytest.fixture
def whole(folder: Folder) -> Path:
    return published(folder, 200)[0]


def why(path: Path) -> str:
    """Why it does not count, or is not whole; one line."""
    with pytest.raises(Damaged) as told:
        check_files(path, read_committed(path))
    text = str(told.value)
    assert text and len(text) < 300 and "\n" not in text
    return text


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "kind", "step", "by"),
    [
        ("step-00000200", "step", 200, ""),
        ("step-123456789", "step", 123456789, ""),
        (".saving-00000200.g0-1.x", "saving", 200, "g0-1.x"),
        (".dropped-step-00000200.ab", "dropped", -1, ""),
        ("aside-step-00000200", "aside", -1, ""),
        ("aside-step-00000200.2", "aside", -1, ""),
        ("step-000000200", "alien", -1, ""),  # nine digits, and one would do with eight
        ("step-200", "alien", -1, ""),
        ("step-00000200.tmp", "alien", -1, ""),
        ("step-٠٠٠٠٠٢٠٠", "alien", -1, ""),
        ("step-00000200\n", "alien", -1, ""),
        (".saving-00000200", "alien", -1, ""),
        ("STOP", "alien", -1, ""),
    ],
)
def test_what_an_entry_is(name: str, kind: str, step: int, by: str) -> None:
    assert names.found(name) == names.Found(name, kind, step, by)


@pytest.mark.parametrize("step", [0, 99_999_999, 100_000_000, names.STEP_MAX - 1])
def test_names_are_found_again(step: int) -> None:
    assert names.found(names.step_name(step)) == names.Found(names.step_name(step), "step", step)
    saving = names.saving_name(step, "g0-1")
    assert names.found(saving) == names.Found(saving, "saving", step, "g0-1")
    assert names.found(names.dropped_name(saving, "ab")).kind == "dropped"
    assert names.found(names.aside_name(names.step_name(step))).kind == "aside"


@pytest.mark.parametrize("step", [-1, names.STEP_MAX])
def test_a_step_that_there_is_not_has_no_name(step: int) -> None:
    for name in (names.step_name, lambda step: names.saving_name(step, "g0-1")):
        with pytest.raises(ValueError, match="steps behind it"):
            name(step)


def test_the_longest_names_of_groups_fit(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "g" * 100 + "-1234567890-12345678")
    path = folder.saving(200)
    assert folder.saving(200) == path and os.listdir(tmp_path) == [path.name]  # that of the earlier try was dropped


# ---------------------------------------------------------------- writing


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")
    write_whole(tmp_path / "there", b"new")
    assert (tmp_path / "there").read_bytes() == b"new"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "folder", b"x")
    assert sorted(os.listdir(tmp_path)) == ["folder", "there"]


def test_what_is_measured(tmp_path: Path) -> None:
    data = random.Random(3).randbytes((4 << 20) + 1)  # more than is read at once
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert measured(tmp_path / "a").bytes == len(data)
    assert measured(tmp_path / "a").xxh3 != measured(tmp_path / "b").xxh3


def test_a_checkpoint_is_what_was_written(folder: Folder, whole: Path) -> None:
    manifest = read_committed(whole)
    check_files(whole, manifest)
    assert (manifest.step, manifest.state.step, manifest.microbatches) == (200, 199, 4800)
    assert sorted(manifest.files) == data_files(whole) == [".metadata", "__0_0.distcp"]
    assert sorted(os.listdir(whole)) == [".metadata", MARKER, "__0_0.distcp", MANIFEST]
    marker = msgspec.json.decode((whole / MARKER).read_bytes())
    assert (marker["final"], marker["by"], marker["manifest"]) == (FINAL, "g0-1", read_manifest(whole)[1])


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_data_file_that_is_not_what_was_written(whole: Path, name: str) -> None:
    data = (whole / name).read_bytes()
    (whole / name).write_bytes(data[:-1])
    assert why(whole) == f"{name} has {len(data) - 1} bytes instead of {len(data)}"
    (whole / name).write_bytes(b"")
    assert why(whole) == f"{name} has 0 bytes instead of {len(data)}"
    (whole / name).write_bytes(data[:5] + bytes([data[5] ^ 4]) + data[6:])
    assert why(whole) == f"{name} has other bytes than were written"
    (whole / name).unlink()
    assert why(whole) == f"{name} is missing"
    os.mkfifo(whole / name)
    assert why(whole) == f"{name} is missing"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_data_file_that_may_not_be_read(whole: Path) -> None:
    (whole / ".metadata").chmod(0)
    assert why(whole) == ".metadata cannot be read: Permission denied"


@pytest.mark.parametrize("name", [MANIFEST, MARKER])
def test_manifest_and_marker_torn_anywhere_do_not_count(whole: Path, name: str) -> None:
    data = (whole / name).read_bytes()
    for length in range(len(data) - 1):  # the last byte is a line's end
        (whole / name).write_bytes(data[:length])
        why(whole)


def test_a_manifest_with_one_other_byte_does_not_count(whole: Path) -> None:
    data = (whole / MANIFEST).read_bytes()
    draw = random.Random(8)
    for place in range(len(data)):
        (whole / MANIFEST).write_bytes(data[:place] + bytes([data[place] ^ draw.randrange(1, 256)]) + data[place + 1 :])
        why(whole)


FOREIGN = [
    (b"", "is empty"),
    (b"\x00" * 100, "is none: JSON is malformed"),
    (b"\xff\xfe", "is none"),
    (b"null", "is none: Expected `object`, got `null`"),
    (b"{}", "is none: Object missing required field `step`"),
    (b'{"x": ' + b"[" * 200_000, "is none"),
]


@pytest.mark.parametrize(("data", "told"), FOREIGN, ids=range(len(FOREIGN)))
@pytest.mark.parametrize(("name", "what"), [(MANIFEST, "its manifest"), (MARKER, "its commit marker")])
def test_a_foreign_manifest_or_marker_is_told(whole: Path, name: str, what: str, data: bytes, told: str) -> None:
    (whole / name).write_bytes(data)
    assert why(whole).startswith(f"{what} {told}")


@pytest.mark.parametrize(("name", "what"), [(MANIFEST, "manifest"), (MARKER, "commit marker")])
def test_what_is_no_file_is_told_and_never_waited_for(whole: Path, name: str, what: str) -> None:
    (whole / name).unlink()
    assert why(whole) == f"it has no {what}"
    os.mkfifo(whole / name)
    assert why(whole) == f"its {what} cannot be read: it is no regular file"
    (whole / name).unlink()
    (whole / name).mkdir()
    assert why(whole) == f"its {what} cannot be read: it is no regular file"


def test_a_manifest_of_another_format_is_told_though_its_fields_are_others(whole: Path) -> None:
    (whole / MANIFEST).write_bytes(b'{"format": 2, "steps": [1]}')
    assert why(whole) == f"its manifest has format 2, and this version reads {FORMAT}"


def test_a_field_that_is_new_is_no_damage(folder: Folder) -> None:
    path = written(folder, 200)
    fields = msgspec.json.decode((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(msgspec.json.encode({**fields, "of_a_later_version": {"a": [1]}}))
    assert read_committed(folder.publish(path, FINAL)).step == 200


def test_the_marker_of_another_manifest_does_not_count(folder: Folder, whole: Path) -> None:
    (other,) = published(folder, 100, epoch=3)
    (whole / MARKER).write_bytes((other / MARKER).read_bytes())
    assert why(whole) == "its commit marker is that of another manifest (of step 99 of e3/1@lh)"


def test_a_manifest_has_its_defaults_when_they_are_left_out() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(Manifest)}
    assert fields["loaded"].default is False and fields["samples"].default is None


def test_the_marker_is_readable_for_others(whole: Path) -> None:
    """A job's user writes, another one restores: no temporary file's narrow mode is left."""
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((whole / MARKER).stat().st_mode) == 0o666 & ~umask
