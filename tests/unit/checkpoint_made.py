"""Small checkpoints for tests: files of our own instead of torch's, all else as the real ones have it."""

from __future__ import annotations

from pathlib import Path

from lightkeeper.checkpoint.files import data_files, measured, write_whole
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.manifest import Manifest, RankState, State, encode
from lightkeeper.checkpoint.names import MANIFEST, METADATA

FINAL = "the next step was reduced"


def written(folder: Folder, step: int, epoch: int = 1, wall: float = 100.0, held: str = "", size: int = 100) -> Path:
    """A checkpoint that is whole and not published: two files, one of `size` bytes, and the manifest.

    Args:
        folder: of its writer.
        step: how many steps its state has behind it.
        epoch: number of the epoch that committed it.
        wall: seconds since the Unix epoch at which it was copied.
        held: what its rank held; one that follows from step and epoch if empty.
        size: of the larger file, in bytes.
    """
    path = folder.saving(step)
    (path / METADATA).write_bytes(b"index of step %d" % step)
    (path / "__0_0.distcp").write_bytes((b"%d/%d." % (step, epoch)).ljust(size, b"x"))
    files = {name: measured(path / name) for name in data_files(path)}
    manifest = Manifest(
        step=step, state=State(epoch, 1, "lh", step - 1), job="j", group="g0", incarnation=folder.by, wall=wall,
        ranks=1, seed=7, microbatches=24 * step, held=[RankState("d", held or f"{step}/{epoch}")],
        files=files, bytes=sum(file.bytes for file in files.values()),
    )  # fmt: skip
    write_whole(path / MANIFEST, encode(manifest))
    return path


def published(folder: Folder, *steps: int, epoch: int = 1, wall: float = 100.0, held: str = "") -> list[Path]:
    """Checkpoints that are committed."""
    return [folder.publish(written(folder, step, epoch, wall, held), FINAL) for step in steps]
