"""What a manifest says besides the tensors: counts, seeds, versions, what all groups have in common."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from lightkeeper.checkpoint.manifest import Manifest
from lightkeeper.checkpoint.saver import Make
from lightkeeper.checkpoint.writing import Written, state_of
from lightkeeper.data.sampler import Schedule
from lightkeeper.errors import UsageError
from lightkeeper.lighthouse.names import Entry
from lightkeeper.manager.state.snapshot import Snapshot
from lightkeeper.words import say

if TYPE_CHECKING:
    from lightkeeper.manager.trainer import Manager

MUST_BE_ALIKE = ("seed", "microbatches of step 0")  # data order and batch follow from them
SHOWN_CHARS = 120


class Facts:
    """The facts of a run.

    Args:
        manager: the loop's.
        samples: see `Checkpoints`.
        accept: names of `MUST_BE_ALIKE` that may differ from the run that was saved.
    """

    def __init__(self, manager: Manager, samples: Callable[[int], int] | None, accept: tuple[str, ...]) -> None:
        strange = sorted(set(accept) - set(MUST_BE_ALIKE))
        if strange:
            raise UsageError(f"accept {strange[0]!r}: give names of {', '.join(MUST_BE_ALIKE)}")
        self._manager, self._samples, self._accept = manager, samples, accept
        self._began_s = time.monotonic()
        self._code = _code()
        self._schedule: Schedule | None = None
        self._loaded: Manifest | None = None
        self._checked = False

    def loaded(self, manifest: Manifest) -> None:
        """The run was begun from this checkpoint."""
        self._loaded = manifest

    def check(self, index: int) -> None:
        """Before the first step: compares this run with the one that was saved.

        Raises:
            UsageError: they differ in what would make it another run.
        """
        if self._checked:
            return
        self._checked = True
        before = self._loaded
        if before is None:
            return
        now = self._manager.signature()
        changed = {
            name: (before.signature.get(name, "nothing"), now.get(name, "nothing"))
            for name in {**before.signature, **now}
            if before.signature.get(name) != now.get(name)
        }
        changed.pop("until", None)  # a run that was stopped, or goes on for longer, is the same run
        if "ranks" in changed:  # then all tensors lie otherwise
            changed = {name: pair for name, pair in changed.items() if "[" not in "".join(pair)}
        for name in MUST_BE_ALIKE:
            if name in changed and name not in self._accept:
                was, wants = changed[name]
                raise UsageError(
                    f"the checkpoint of step {before.step} is of a run with {name} {was}, and this one has {wants}: "
                    "its data order would be another; give it the former, or if another is meant, "
                    f"Checkpoints(accept=({name!r},))"
                )
        if self._manager.rank == 0 and changed:
            told = "; ".join(f"{name} was {was} and is {wants}" for name, (was, wants) in sorted(changed.items()))
            say(f"lightkeeper: since the checkpoint of step {before.step}: {told[:1000]}")
        if self._manager.rank == 0 and before.code and before.code != self._code:
            say(f"lightkeeper: the script is not the one that wrote the checkpoint of step {before.step}")

    def of(self, name: Entry) -> Make:
        """Makes the manifest of a state, of what is known when it is copied; on the training thread."""
        manager, step = self._manager, name.step + 1
        if self._schedule is None:
            self._schedule = Schedule(manager.total)
        microbatches = self._schedule.before(step)
        samples = None if self._samples is None else int(self._samples(step))
        signature = manager.signature()
        before = self._loaded
        trained_s = time.monotonic() - self._began_s + (0.0 if before is None else before.trained_s)
        restarts = 0 if before is None else before.restarts + 1
        wall = time.time()

        def make(written: Written, snapshot: Snapshot) -> Manifest:
            from lightkeeper import __version__

            versions = {
                "torch": str(torch.__version__),
                "lightkeeper": __version__,
                "python": platform.python_version(),
            }
            return Manifest(
                step=step, state=state_of(name), job=manager.settings.job, group=manager.settings.group,
                incarnation=manager.incarnation, wall=wall, ranks=manager.settings.ranks, seed=manager.seed,
                microbatches=microbatches, samples=samples, code=self._code, config=_hash(signature),
                signature=signature, held=written.held, versions=versions, files=written.files, bytes=written.bytes,
                copy_s=snapshot.seconds, write_s=written.seconds, loaded=written.loaded, restarts=restarts,
                trained_s=trained_s,
            )  # fmt: skip

        return make


def _code() -> str:
    """xxh3_128 of the script that runs; "" if there is none."""
    try:
        return xxhash.xxh3_128_hexdigest(Path(sys.argv[0]).read_bytes())
    except OSError:
        return ""


def _hash(signature: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(signature, sort_keys=True).encode())
