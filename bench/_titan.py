"""torchtitan's loop in a bench: its debug model on one thread, in blocks of steps that take turns with another run.

    python -m lightkeeper.bench._titan JSON TORCHTITAN'S ARGUMENTS

The JSON: `plain` (torchtitan alone), `name` (of this rank, for its files), `folder` (where they go), `warm` (steps
before the first block), `block` (steps of a block; 0: no blocks) and `last` (the step whose state is told, and where it
ends).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.002
WAIT_S_MAX = 600.0


class Turns:
    """A loop that runs in blocks of steps and stands between them until it is told to go on.

    Args:
        folder: where the words are exchanged, as files.
        name: of this process.
        warm: steps before the first block; they are timed, as block 0.
        block: steps of a block; 0: the loop never stands.
    """

    def __init__(self, folder: Path, name: str, warm: int, block: int) -> None:
        self._folder, self._name, self._warm, self._block = folder, name, warm, block
        self._seconds: list[float] = []
        self._since = time.perf_counter()

    def ended(self, step: int) -> None:
        """A step, counted from 1, has ended."""
        self._seconds.append(time.perf_counter() - self._since)
        if self._block and step >= self._warm and (step - self._warm) % self._block == 0:
            number = (step - self._warm) // self._block
            tell(self._folder, f"{self._name}-{number}", self._seconds)
            self._seconds = []
            _await(self._folder / f"go-{self._name}-{number + 1}")
        self._since = time.perf_counter()


def tell(folder: Path, name: str, what: Any) -> None:
    """Puts a file in place, whole."""
    path = folder / f".{name}"
    path.write_text(json.dumps(what))
    path.rename(folder / name)


def _await(path: Path) -> None:
    until = time.monotonic() + WAIT_S_MAX
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path.name} does not come")
        time.sleep(POLL_S)


def _timed(train_step: Callable[..., None], options: dict[str, Any]) -> Callable[..., None]:
    folder, name = Path(options["folder"]), options["name"]
    turns = Turns(folder, name, options["warm"], options["block"])

    def step(trainer: Any, *given: Any) -> None:
        train_step(trainer, *given)
        if trainer.step == options["last"]:
            tell(folder, f"digest-{name}", _digest(trainer))
        turns.ended(trainer.step)

    return step


def _digest(trainer: Any) -> str:
    """Hash of this rank's parameters and optimizer state; unlike a fingerprint not of the mesh that they lie on."""
    import xxhash

    from lightkeeper.manager.buckets import local_tensor
    from lightkeeper.manager.fingerprint import raw_bytes

    digest = xxhash.xxh3_128()
    for part in trainer.model_parts:
        for parameter in part.parameters():
            digest.update(raw_bytes(local_tensor(parameter)))
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            for key in sorted(state):
                digest.update(raw_bytes(local_tensor(state[key])))
    return digest.hexdigest()


def main() -> None:
    """Runs torchtitan's own `main` with steps that are timed."""
    options = json.loads(sys.argv.pop(1))
    from lightkeeper.examples import train_titan  # puts in what a CPU needs, before torchtitan is imported
    from lightkeeper.integrations.torchtitan.trainer import FaultTolerantTrainer

    kind: Any = train_titan.Trainer if options["plain"] else FaultTolerantTrainer
    kind.train_step = _timed(kind.train_step, options)
    config = "plain_tiny" if options["plain"] else "tiny"
    sys.argv += ["--module", "lightkeeper.examples.train_titan", "--config", config]
    sys.argv += ["--training.steps", str(options["last"]), "--debug.seed", "0", "--dump_folder", options["folder"]]
    sys.argv += ["--metrics.log_freq", "10"]  # torchtitan's own default
    train_titan.main()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
