"""One save: from a copy in memory to a folder that is whole and checked; all ranks of the group together."""

from __future__ import annotations

import json
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
import xxhash

from lightkeeper.checkpoint.content import Names, Tensors, around, flat_tensors, plainly, state_dict_of
from lightkeeper.checkpoint.files import data_files, fsync_folder, measured, write_whole
from lightkeeper.checkpoint.manifest import File, RankState, State
from lightkeeper.checkpoint.names import METADATA
from lightkeeper.checkpoint.ranks import Ranks
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.buckets import local_tensor, placements_of
from lightkeeper.manager.fingerprint import raw_bytes
from lightkeeper.manager.state.layout import Layout
from lightkeeper.manager.state.snapshot import Snapshot

T = TypeVar("T")

DESCRIPTION = "state.json"  # what torch's format would not keep exactly, and the order of the optimizers' parameters


class SaveFailed(Exception):
    """A save came to nothing; one line says why. What was written is no checkpoint."""


@dataclass(frozen=True)
class Written:
    """What a save left on the disk.

    Attributes:
        files: name to size and checksum.
        held: the state, rank by rank.
        loaded: whether it was loaded and compared.
        seconds: for writing and checking.
    """

    files: dict[str, File]
    held: list[RankState]
    loaded: bool
    seconds: float

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(file.bytes for file in self.files.values())


def state_of(name: Entry) -> State:
    """The name of a state as it stands in a manifest."""
    return State(name.epoch.number, name.epoch.term.number, name.epoch.term.lighthouse, name.step)


def write(
    path: Path, snapshot: Snapshot, wholes: Tensors, names: Names, differing: set[str], ranks: Ranks, load: bool
) -> Written:
    """Writes a copy of the state and checks what was written; every rank calls it, in its thread.

    Args:
        path: an empty folder, the same for all ranks.
        snapshot: the copy; held by the caller.
        wholes: the distributed tensors that it is of, by path.
        names: of the objects.
        differing: paths of tensors that may differ between the ranks.
        ranks: of the group.
        load: whether it is loaded and compared as well.

    Raises:
        SaveFailed: on every rank, if it failed on one.
    """
    began = time.monotonic()
    layout = snapshot.layout
    state_dict: dict[str, Any] = {}

    def describe() -> dict[str, str]:
        tensors = {
            header.path: around(tensor, wholes.get(header.path))
            for header, tensor in zip(layout.tensors, snapshot.tensors(), strict=True)
        }
        state_dict.update(state_dict_of(layout, tensors, names))
        return {} if ranks.group is None else _hashes(layout, tensors, differing)

    try:
        alike = together(ranks, describe)
        together(ranks, lambda: _check_alike(alike[0], alike[ranks.rank]))
        _dcp_save(state_dict, path, ranks)
        together(ranks, lambda: _describe(path, layout, names) if ranks.first else None)
        parts = together(ranks, lambda: _measure(path, _own_files(path, ranks)))
        files = {name: file for part in parts for name, file in part.items()}
        if load:
            _load_and_compare(path, state_dict, ranks)
        held = together(ranks, lambda: RankState(layout.digest, snapshot.fingerprint))
        together(ranks, lambda: fsync_folder(path) if ranks.first else None)
    except SaveFailed:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # CheckpointException is no Exception: see `_dcp_save`
        raise SaveFailed(_brief(error)) from error
    return Written(files, held, load, time.monotonic() - began)


def together(ranks: Ranks, do: Callable[[], T]) -> list[T]:
    """What `do` gives on every rank; each must come to it, or the ranks would take one another's word for another's.

    Raises:
        SaveFailed: on every rank, if it failed on one.
    """
    failure, mine = "", None
    try:
        mine = do()
    except (OSError, SaveFailed) as error:
        failure = _brief(error)
    except Exception as error:  # a bug: the other ranks would wait for this one without end
        traceback.print_exc()
        failure = _brief(error)
    try:
        said = ranks.all((failure, mine))
    except RuntimeError as error:
        raise SaveFailed(f"another rank of the group is gone: {_brief(error)}") from error
    for rank, (failed, _) in enumerate(said):
        if failed:
            raise SaveFailed(failed if len(said) == 1 else f"rank {rank}: {failed}")
    return [cast(T, one) for _, one in said]


def _dcp_save(state_dict: Mapping[str, Any], path: Path, ranks: Ranks) -> None:
    writer = dcp.FileSystemWriter(path, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(dict(state_dict), storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    except dcp.CheckpointException as error:  # it derives from BaseException
        rank, (cause, _) = next(iter(error.failures.items()))
        where = "" if ranks.group is None else f"rank {rank}: "
        raise SaveFailed(where + _brief(cause)) from error


def _hashes(layout: Layout, tensors: Tensors, differing: set[str]) -> dict[str, str]:
    """Of what is not distributed, by name."""
    found = {}
    for header in layout.tensors:
        if not header.placements and header.path not in differing:
            found[header.path] = xxhash.xxh3_64_hexdigest(raw_bytes(tensors[header.path]))
    for one in layout.objects:
        if not any(path.startswith(f"{one.name}.") for path in differing):
            found[one.name] = xxhash.xxh3_64_hexdigest(json.dumps(one.tree).encode())
    return found


def _check_alike(first: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """What is not distributed is written once, by some rank: so all of them must hold the same."""
    unlike = sorted(path for path in {**first, **mine} if first.get(path) != mine.get(path))
    if unlike:
        more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
        raise SaveFailed(
            f"{unlike[0]}{more} differs between the ranks of this group, and is no distributed tensor: a checkpoint "
            "would hold one rank's for all; if that is right, register it with scope='group'"
        )


def _describe(path: Path, layout: Layout, names: Names) -> None:
    described = plainly(layout, names.registry)
    if twice := _twice(header.path for header in described.tensors):
        raise SaveFailed(f"two tensors are called {twice} when what compiling and wrapping add is left out: rename one")
    optimizers = {
        name: names.parameters(obj)
        for name, obj in names.registry.shared.items()
        if isinstance(obj, torch.optim.Optimizer)
    }  # fmt: skip
    data = {"layout": described.to_bytes().decode(), "parameters": optimizers}
    write_whole(path / DESCRIPTION, json.dumps(data).encode())


def _twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def _own_files(path: Path, ranks: Ranks) -> list[str]:
    """Every rank measures the files that it wrote; rank 0 what belongs to all."""
    mine = f"__{ranks.rank}_"
    common = (METADATA, DESCRIPTION) if ranks.first else ()
    return [name for name in data_files(path) if name.startswith(mine) or name in common]


def _measure(path: Path, names: Sequence[str]) -> dict[str, File]:
    return {name: measured(path / name) for name in names}


def _load_and_compare(path: Path, state_dict: Mapping[str, Any], ranks: Ranks) -> None:
    """Loads what was written into fresh tensors, and compares every byte with the copy."""
    saved = flat_tensors(state_dict)
    fresh: dict[str, torch.Tensor] = {}

    def allocate() -> None:
        for key, tensor in saved.items():
            empty = torch.empty_like(local_tensor(tensor) if placements_of(tensor) else tensor)
            fresh[key] = around(empty, tensor if placements_of(tensor) else None)

    def compare() -> None:
        wrong = [key for key in saved if not _same_bytes(local_tensor(fresh[key]), local_tensor(saved[key]))]
        if wrong:
            raise SaveFailed(f"{wrong[0]} was loaded with other bytes than were saved (and {len(wrong) - 1} more)")

    together(ranks, allocate)
    load_into(path, fresh, ranks)
    together(ranks, compare)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Without the interpreter lock, which comparing two memoryviews would hold."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def load_into(path: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Loads tensors by their keys, in place; every rank its own parts.

    Raises:
        SaveFailed: they cannot be loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(
                dict(tensors), storage_reader=dcp.FileSystemReader(path), process_group=ranks.group,
                no_dist=ranks.group is None,
            )  # fmt: skip
    except dcp.CheckpointException as error:
        _, (cause, _) = next(iter(error.failures.items()))
        raise SaveFailed(_brief(cause)) from error


def _brief(error: BaseException) -> str:
    if isinstance(error, SaveFailed):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        name = os.path.basename(str(error.filename or ""))
        return f"{error.strerror}{f' ({name})' if name else ''}"
    lines = str(error).strip().splitlines()
    if any("unexpected pos" in line for line in lines):  # all that torch's writer says of a write that fell short
        return "the storage took less than was written: is it full? (torch says: " + lines[0][:150] + ")"
    return (f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)[:300]
