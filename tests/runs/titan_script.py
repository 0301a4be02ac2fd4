"""torchtitan's loop in these tests: its debug model made small, a digest after each step, slow steps until `hurry`.

    python titan_script.py JSON TORCHTITAN'S ARGUMENTS

Options in the JSON: `trace` (file; ".RANK" is appended), `hurry` (a file that ends the slow steps), `delay` (seconds of
each slow batch), `ends` (batches of the first loader; each further one has one more), `plain` (no fault tolerance),
`stop` (the step after which the process ends), `config` (a function of this module), `behave` (what the group's first
start does wrong while another heals: words of `misbehaviour.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]

from dataclasses import dataclass  # noqa: E402

import train_titan  # noqa: E402 - it puts in what a CPU needs
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.train import main  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from lightkeeper.integrations.torchtitan.config import fault_tolerant  # noqa: E402
from lightkeeper.manager.fingerprint import fingerprint  # noqa: E402

OPTIONS: dict[str, Any] = json.loads(os.environ.get("TITAN_SCRIPT") or sys.argv[1])
LAYERS, LENGTH = 2, 32
RATE = (
    2e-4  # with more it knows its few batches by heart after 20 steps, and a last bit anywhere grows to 1e-4 of a loss
)


class Slow(train_titan.Sequences):
    """As fast as the others once the file is there."""

    @dataclass(kw_only=True, slots=True)
    class Config(train_titan.Sequences.Config):
        pass

    def __iter__(self):
        for batch in super().__iter__():
            if OPTIONS.get("hurry") and not Path(OPTIONS["hurry"]).exists():
                time.sleep(OPTIONS.get("delay", 0.1))
            if self.read > OPTIONS.get("ends", self.read) + self._first:
                return
            yield batch


def small() -> Trainer.Config:
    config = train_titan.plain_tiny()
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    config.training.seq_len, config.training.local_batch_size = LENGTH, 1
    config.dataloader = Slow.Config()
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = RATE
    return config if OPTIONS.get("plain") else fault_tolerant(config)


def misbehave(trainer):
    """From now on, as the options say; a group that its launcher started again behaves well."""
    if OPTIONS.get("behave") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        from misbehaviour import Behaviour

        Behaviour(OPTIONS["behave"], trainer.run.manager, None, None).heal_faults({"die_in": ""})


class Checked(Slow):
    """What is validated on; its config says what torchtitan's own ones do."""

    @dataclass(kw_only=True, slots=True)
    class Config(Slow.Config):
        infinite: bool = True


def validated() -> Trainer.Config:
    config = small()
    config.validator = Validator.Config(enable=True, freq=20, steps=2, dataloader=Checked.Config())
    return config


def _log_of(processor):
    """The losses, by step, that are logged from now on: as they are, and not as they are printed."""
    logged, log = {}, type(processor).log

    def kept(step, global_avg_loss, *given, **named):
        logged[step] = global_avg_loss
        log(processor, step, global_avg_loss, *given, **named)

    processor.log = kept
    return logged


def traced(train_step):
    """Writes what each step left behind."""

    def step(self, *given):
        logged = _log_of(self.metrics_processor)
        train_step(self, *given)
        if self.step == 1:
            misbehave(self)
        digest = fingerprint(self.model_parts[0], list(self.optimizers))
        run = getattr(self, "run", None)
        line = {
            "step": self.step, "digest": digest, "live": run is None or run.step.live,
            "lr": self.lr_schedulers.get_metrics(), "seen": self.ntokens_seen, "exact": logged.get(self.step),
        }  # fmt: skip
        path = f"{OPTIONS['trace']}.{os.environ['RANK']}"
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
        if self.step == OPTIONS.get("stop"):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    return step


if __name__ == "__main__":
    from lightkeeper.integrations.torchtitan.trainer import FaultTolerantTrainer

    for kind in (Trainer, FaultTolerantTrainer):
        if "train_step" in vars(kind) and (kind is Trainer) == bool(OPTIONS.get("plain")):
            kind.train_step = traced(kind.train_step)
    os.environ["TITAN_SCRIPT"] = sys.argv.pop(1)  # the module is imported once more by torchtitan, by name
    sys.argv += ["--module", "titan_script", "--config", OPTIONS.get("config", "small")]
    main()
