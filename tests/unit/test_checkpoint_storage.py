"""A storage that is full, or takes nothing: an error is raised, nothing that counts is spoilt, and then it goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import errno, os, subprocess, sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from checkpoint_made import FINAL, published, written
from lightkeeper.checkpoint.files import check_files
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.manifest import read_committed

place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(place)], check=True)
folder = Folder(place / "checkpoints", "g0-1")


def refused(number, do):
    try:
        do()
    except OSError as error:
        assert error.errno == number, error
    else:
        raise AssertionError("it was not refused")


def full():
    with (place / "filler").open("wb", buffering=0) as file:
        refused(errno.ENOSPC, lambda: [file.write(bytes(4096)) for _ in range(100)])


published(folder, 1, 2, 3)
path = written(folder, 4)
full()
before = sorted(os.listdir(path))
refused(errno.ENOSPC, lambda: folder.publish(path, FINAL))  # no room for the marker
assert folder.newest() == 3 and sorted(os.listdir(path)) == before
refused(errno.ENOSPC, lambda: written(folder, 5))  # none for the files
assert folder.newest() == 3
assert folder.prune(2) == [place / "checkpoints" / "step-00000001"]  # deleting needs none
folder.sweep(3)
(place / "filler").unlink()
folder.publish(path, FINAL)
published(folder, 5)
assert folder.newest() == 5

subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
refused(errno.EROFS, lambda: folder.saving(6))
refused(errno.EROFS, lambda: folder.prune(2))
refused(errno.EROFS, lambda: folder.put_aside(1))
refused(errno.EROFS, lambda: folder.drop(place / "checkpoints" / "step-00000002"))
committed = [one for one in folder.listed() if one.manifest is not None]
assert [one.step for one in committed] == [5, 4, 3, 2]
for one in committed:
    check_files(one.path, read_committed(one.path))
print("went through")
"""


def test_a_storage_that_is_full_and_one_that_is_read_only(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount anything")
    words = [*alone, sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "went through\n"), done.stderr
