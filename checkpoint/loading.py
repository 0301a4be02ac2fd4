"""A real load of a checkpoint, in this process alone, into fresh tensors.

torch reads its own format here, and unpickles: its index, and what is no tensor. So only what the job itself wrote, and
what has the checksums of its manifest, should be loaded.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightkeeper.checkpoint.manifest import Damaged
from lightkeeper.words import shown

_SINGLE = "torch.distributed is disabled, unavailable or uninitialized"  # what torch warns of: it is meant


def load_fresh(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds.

    It is loaded by `torch.distributed.checkpoint`, whole, whatever ranks wrote it; no process group takes part. It
    needs as much memory as the checkpoint has bytes.

    Args:
        path: of the checkpoint.

    Returns:
        By the names that the index has: tensors on the CPU, with the dtypes and global shapes in which they were
        written, and whatever else was.

    Raises:
        Damaged: it cannot be loaded, or a part of a tensor is missing.
    """
    # Not `catch_warnings`: a load may run beside training, and that would undo what other threads filter meanwhile.
    warnings.filterwarnings("ignore", message=_SINGLE)
    try:
        # Only torch's own code runs below, on bytes that may be anything; unpickling those may raise anything.
        state = _template(FileSystemReader(path).read_metadata())
        dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    except Damaged:
        raise
    except CheckpointException as error:  # no Exception
        first = next(iter(error.failures.values()))[0]
        if not isinstance(first, Exception):  # Ctrl-C, which torch wraps as well
            raise first from None
        raise Damaged(_told(first)) from error
    except Exception as error:
        raise Damaged(_told(error)) from error
    return state


def _template(metadata: Metadata) -> dict[str, Any]:
    """What the index names, unfilled.

    Raises:
        Damaged: the parts that it names are not all of a tensor; torch would leave the rest as the memory was.
    """
    state: dict[str, Any] = {}
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            state[name] = None
            continue
        there = sum(math.prod(chunk.sizes) for chunk in described.chunks)
        if there != math.prod(described.size):
            raise Damaged(f"its index has {there} of {math.prod(described.size)} elements of {name}")
        state[name] = torch.empty(described.size, dtype=described.properties.dtype)
    return state


def _told(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return shown(f"torch cannot load it: {type(error).__name__}{': ' if first else ''}{first}", 250)
