"""Small checkpoints for tests: files of our own instead of torch's, all else as the real ones have it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightkeeper.checkpoint.files import data_files, measured, write_whole
from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.manifest import Manifest, RankState, State, encode
from lightkeeper.checkpoint.names import MANIFEST, METADATA

FINAL = "the next step was reduced"


def of_our_own(path: Path) -> None:
    """Two files that stand for torch's."""
    (path / METADATA).write_bytes(b"index of all parts")
    (path / "__0_0.distcp").write_bytes(b"data of a rank".ljust(100, b"."))


def written(
    folder: Folder,
    step: int,
    epoch: int = 1,
    wall: float = 100.0,
    held: str = "",
    fill: Callable[[Path], None] = of_our_own,
) -> Path:
    """A checkpoint that is whole and not published.

    Args:
        folder: of its writer.
        step: how many steps its state has behind it.
        epoch: number of the epoch that committed it.
        wall: seconds since the Unix epoch at which it was copied.
        held: what its rank held; one that follows from step and epoch if empty.
        fill: writes all files but the manifest.
    """
    path = folder.saving(step)
    fill(path)
    files = {name: measured(path / name) for name in data_files(path)}
    group, _, incarnation = folder.by.partition("-")
    manifest = Manifest(
        step=step, state=State(epoch, 1, "lh", step - 1), job="j", group=group, incarnation=incarnation, wall=wall,
        ranks=1, seed=7, microbatches=24 * step, held=[RankState("d", held or f"{step}/{epoch}")],
        files=files, bytes=sum(file.bytes for file in files.values()),
    )  # fmt: skip
    write_whole(path / MANIFEST, encode(manifest))
    return path


def published(folder: Folder, *steps: int, **how: Any) -> list[Path]:
    """Checkpoints that are committed."""
    return [folder.publish(written(folder, step, **how), FINAL) for step in steps]
