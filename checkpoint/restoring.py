"""Puts a checkpoint into the objects here: in place, on any number of ranks, and compared with what was saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightkeeper.checkpoint.content import Names, flat_tensors, laid_out_here, state_dict_of
from lightkeeper.checkpoint.files import check_files
from lightkeeper.checkpoint.manifest import Damaged, Manifest
from lightkeeper.checkpoint.ranks import Ranks
from lightkeeper.checkpoint.writing import DESCRIPTION, SaveFailed, load_into
from lightkeeper.errors import UsageError
from lightkeeper.manager.state.layout import Layout, LayoutError, layout_of
from lightkeeper.manager.state.registry import StateRegistry, leaves_in
from lightkeeper.manager.state.restore import StateDoesNotFit, Target
from lightkeeper.manager.state.segments import checksum_ranges


class OtherState(UsageError):
    """The checkpoint is whole, and holds another state than the objects here can take."""


@dataclass(frozen=True)
class Restored:
    """What was loaded; `compared`: whether its hash could be compared with that of what was saved."""

    bytes: int
    compared: bool


def check_together(path: Path, manifest: Manifest, ranks: Ranks) -> str:
    """Reads all files of a checkpoint and compares them with its manifest, every rank some of them.

    Returns:
        What is wrong with it, the same on every rank; "" if it is whole.
    """
    names = sorted(manifest.files)[ranks.rank :: ranks.size]
    problem = ""
    try:
        check_files(path, manifest, names)
    except Damaged as error:
        problem = str(error)
    return next((said for said in ranks.all(problem) if said), "")


def restore(path: Path, manifest: Manifest, names: Names, ranks: Ranks) -> Restored:
    """Loads a checkpoint that was checked; every rank calls it. The objects here are overwritten.

    Raises:
        OtherState: it does not fit; nothing was overwritten.
        Damaged: torch cannot load it, or what was loaded is not what was saved.
    """
    registry = names.registry
    saved = _description(path, names)
    layout = laid_out_here(saved, registry)
    try:
        target = Target(registry, layout)
    except StateDoesNotFit as error:
        raise OtherState(
            f"the checkpoint {path} is of another script: {error}; start the one that wrote it, or begin anew with "
            "Checkpoints(fresh=True)"
        ) from error
    tensors = target.tensors()
    state_dict = state_dict_of(layout, tensors, names)
    wanted = flat_tensors(state_dict)
    try:
        load_into(path, wanted, ranks)
    except (SaveFailed, OSError, RuntimeError, ValueError) as error:
        raise Damaged(f"torch cannot load it: {error}"[:300]) from error
    target.filled()
    try:
        target.finish()
    except Exception as error:
        raise OtherState(f"an object does not take its state of {path} back: {error!r}"[:300]) from error
    return Restored(sum(tensor.nbytes for tensor in tensors.values()), _compare(manifest, registry, saved, ranks))


def _description(path: Path, names: Names) -> Layout:
    try:
        data: Any = json.loads((path / DESCRIPTION).read_bytes())
        layout = Layout.from_bytes(data["layout"].encode())
        parameters: dict[str, Sequence[str]] = data["parameters"]
    except (OSError, ValueError, KeyError, TypeError, LayoutError) as error:
        raise Damaged(f"{DESCRIPTION} is malformed: {error}"[:300]) from error
    import torch

    for name, there in parameters.items():
        optimizer = names.registry.shared.get(name)
        if isinstance(optimizer, torch.optim.Optimizer) and names.parameters(optimizer) != list(there):
            mine = names.parameters(optimizer)
            first = next((pair for pair in zip(mine, there, strict=False) if pair[0] != pair[1]), None)
            what = (
                f"{len(mine)} here and {len(there)} there" if first is None else f"{first[0]} where it has {first[1]}"
            )
            raise OtherState(f"the checkpoint {path} does not fit: {name} has other parameters here ({what})")
    return layout


def _compare(manifest: Manifest, registry: StateRegistry, saved: Layout, ranks: Ranks) -> bool:
    """Whether the state here has the hash of what was saved; False if it lies otherwise, so that none is known.

    Raises:
        Damaged: it has another.
    """
    captured = registry.capture()
    now = layout_of(saved.name, captured, saved.range_bytes)
    known = manifest.held[ranks.rank] if manifest.ranks == ranks.size == len(manifest.held) else None
    problem, compared = "", False
    if known is not None and known.digest == now.digest:
        compared = True
        if now.fingerprint(checksum_ranges(now, leaves_in(captured))) != known.fingerprint:
            problem = "what was loaded has another hash than what was saved"
    said = ranks.all((problem, compared))
    if wrong := next((why for why, _ in said if why), ""):
        raise Damaged(wrong)
    return all(one for _, one in said)
