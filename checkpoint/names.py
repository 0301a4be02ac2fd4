"""What stands in a checkpoint folder, by its name.

As on a building site: a house gets its number when it is finished, and what is being built or torn down is fenced off,
so that nobody moves in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST = "manifest.json"
MARKER = "COMMITTED"
METADATA = ".metadata"  # torch's own index of a checkpoint
STOP, SAVE = "STOP", "SAVE"  # files that a person puts there
STEP_MAX = 10**12

_STEP = re.compile(r"step-([0-9]{8,12})")
_SAVING = re.compile(r"\.saving-([0-9]{8,12})\.(.+)")
_DROPPED = re.compile(r"\.dropped-(.+)")
_ASIDE = re.compile(r"aside-(.+)")


@dataclass(frozen=True)
class Found:
    """One entry of a checkpoint folder.

    Attributes:
        name: of the entry.
        kind: ``step``, whole and perhaps committed; ``saving``, being written or broken off; ``dropped``, being
            deleted; ``aside``, put aside by a person's wish; ``alien``, nothing of ours.
        step: how many steps its state has behind it; -1 if that is not known.
        by: who writes it, of one that is being written.
    """

    name: str
    kind: str
    step: int = -1
    by: str = ""


def step_name(step: int) -> str:
    """Name of the checkpoint whose state has so many steps behind it.

    Raises:
        ValueError: there is no such step.
    """
    return f"step-{_digits(step)}"


def saving_name(step: int, by: str) -> str:
    """Name of one that is being written; `by` is different for every process that may write it.

    Raises:
        ValueError: there is no such step.
    """
    return f".saving-{_digits(step)}.{by}"


def dropped_name(name: str, once: str) -> str:
    """Name under which a checkpoint is deleted; `once` is different for every one.

    Who wrote it stands in the name of one that was being written, at most once: a name has at most 255 bytes.
    """
    return f".dropped-{name.lstrip('.')}.{once}"


def aside_name(name: str) -> str:
    """Name of one that is kept and no longer counts."""
    return f"aside-{name}"


def _digits(step: int) -> str:
    if not 0 <= step < STEP_MAX:
        raise ValueError(f"step {step}: a checkpoint has 0 to {STEP_MAX - 1} steps behind it")
    return f"{step:08d}"


def found(name: str) -> Found:
    """What an entry of this name is."""
    if match := _STEP.fullmatch(name):
        step = int(match[1])
        return Found(name, "step", step) if step_name(step) == name else Found(name, "alien")
    if match := _SAVING.fullmatch(name):
        return Found(name, "saving", int(match[1]), match[2])
    if _DROPPED.fullmatch(name):
        return Found(name, "dropped")
    if _ASIDE.fullmatch(name):
        return Found(name, "aside")
    return Found(name, "alien")
