"""torchtitan's own training loop in replica groups, with a small model and made-up data: runs without a GPU.

    lightkeeper launch --group g0 --groups 3 -- examples/train_titan.py --config tiny --training.steps 1000

On GPUs no script is needed: see "torchtitan" in the README. The arguments are torchtitan's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightkeeper.integrations.torchtitan import cpu

cpu.install()  # before anything of torchtitan's is imported

import torch  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CommConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.train import main  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from lightkeeper.integrations.torchtitan.config import fault_tolerant  # noqa: E402

SYMBOLS = 97


class Bytes(BaseTokenizer):
    """A token is a byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Any = None, *, tokenizer_path: str = "") -> None:
        super().__init__()
        self.eos_id = 2

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Bytes of a text."""
        return list(str(args[0]).encode())

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Text of bytes."""
        return bytes(args[0]).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """As the small model's."""
        return 2048


class Sequences(BaseDataLoader):
    """Batch after batch of arithmetic sequences, each told by its first symbol; every rank reads its own ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to choose."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._every, self._first = dp_world_size, dp_rank
        self._length, self._size = seq_len, local_batch_size
        self.read = 0

    def __iter__(self) -> Any:
        """Without end."""
        while True:
            first = (self.read * self._every + self._first) * self._size
            symbols = (torch.arange(self._size) + first) % SYMBOLS
            rows = [symbols]
            for _ in range(self._length):
                symbols = (symbols * 5 + 3) % SYMBOLS
                rows.append(symbols)
            text = torch.stack(rows, 1)
            self.read += 1
            positions = torch.arange(self._length).repeat(self._size, 1)
            yield {"input": text[:, :-1].contiguous(), "positions": positions}, text[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """How many batches were read."""
        return {"read": self.read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after so many."""
        self.read = state_dict["read"]


def plain_tiny() -> Trainer.Config:
    """Torchtitan's llama3 debug model, six million parameters."""
    spec = cpu.on_cpu(model_registry("debugmodel"))
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        hf_assets_path=".",
        model_spec=spec,
        tokenizer=Bytes.Config(),
        dataloader=Sequences.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2, seq_len=128, steps=20, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(),
        activation_checkpoint=None,
        comm=CommConfig(trace_buf_size=0),
    )


def tiny() -> Any:
    """The same, fault tolerant."""
    return fault_tolerant(plain_tiny())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if not any(argument.startswith("--module") for argument in sys.argv):
        sys.argv += ["--module", Path(__file__).stem]
    main()
