"""torchtitan's own loop as one rank of a test: a small model in many configurations, with a trace of what it did.

Options: `variant` (names of `VARIANTS`, with blanks between), `plain` (torchtitan alone), `steps`, `microbatches`,
`delay` (seconds of a microbatch, until the file `hurry` is there), `sync`, `trace`, `folder`; `places` (of a group, for
`plain`).
"""

# ruff: noqa: E402 - torchtitan looks for CUDA as soon as it is imported

from __future__ import annotations

import hashlib
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightkeeper.integrations.torchtitan import cpu

cpu.install()
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
import torch.distributed as dist
import torchtitan.models.llama3 as titan_llama
import torchtitan.trainer as titan
import train_titan
from loops import Trace
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools.logging import init_logger

from lightkeeper.integrations.torchtitan.config import fault_tolerant
from lightkeeper.integrations.torchtitan.trainer import FaultTolerantTrainer

LAYERS, LENGTH = 2, 32


# ---------------------------------------------------------------- what can be configured


def _moe(config: Any) -> None:
    """Two experts, one of them for each token, in each layer of Qwen3's smallest model."""
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.qwen3 import _build_qwen3_moe_layers, model_registry

    spec = model_registry("debugmodel_moe")
    spec.model.layers = _build_qwen3_moe_layers(
        n_layers=LAYERS, dim=256, n_heads=4, n_kv_heads=2, head_dim=64, moe_hidden_dim=64, num_experts=2, top_k=1,
        attn_backend="varlen", moe_comm_backend="standard", rope=CosSinRoPE.Config(dim=64, max_seq_len=512, theta=1e6),
    )  # fmt: skip
    for layer in spec.model.layers:
        layer.moe.load_balance_coeff = 0.02  # so that the bias turns some tokens to the other expert
    config.model_spec = cpu.on_cpu(spec)


def _lora(config: Any) -> None:
    """Most parameters are frozen."""
    from torchtitan.components.lora import LoRAConverter

    spec = titan_llama.model_registry("debugmodel", converters=[LoRAConverter.Config()])
    spec.model.layers = spec.model.layers[:LAYERS]
    config.model_spec = cpu.on_cpu(spec)


def _optimizers(config: Any) -> None:
    """Two optimizers, one of them with two groups of parameters."""
    same = {"betas": (0.9, 0.95), "eps": 1e-8}
    config.optimizer.param_groups = [
        ParamGroupConfig(
            pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 8e-4, "weight_decay": 0.0, **same}
        ),
        ParamGroupConfig(pattern="tok_embeddings", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-4, **same}),
        ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 8e-4, "weight_decay": 0.1, **same}
        ),
    ]


def _chunked(config: Any) -> None:
    config.loss = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=config.loss)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        *parents, last = path.split(".")
        for name in parents:
            config = getattr(config, name)
        setattr(config, last, value)

    return change


VARIANTS: dict[str, Callable[[Any], None]] = {
    "base": lambda config: None,
    "moe": _moe,
    "chunked": _chunked,
    "lora": _lora,
    "optimizers": _optimizers,
    "compiled": lambda config: setattr(config, "compile", CompileConfig(enable=True)),
    "compiled-aot": lambda config: setattr(config, "compile", CompileConfig(enable=True, backend="aot_eager")),
    "full-ac": lambda config: setattr(config, "activation_checkpoint", FullAC.Config()),
    "selective-ac": lambda config: setattr(config, "activation_checkpoint", SelectiveAC.Config()),
    "bf16": _set("training.mixed_precision_param", "bfloat16"),
    "all-bf16": _set("training.dtype", "bfloat16"),
    "foreach": _set("optimizer.implementation", "foreach"),
    "for-loop": _set("optimizer.implementation", "for-loop"),
    "opt-states-bf16": _set("optimizer.implementation", "fused_opt_states_bf16"),
    "full-dtensor": _set("parallelism.spmd_backend", "full_dtensor"),
    "tp": _set("parallelism.tensor_parallel_degree", 2),
    "no-sp": _set("parallelism.enable_sequence_parallel", False),
    "hsdp": _set("parallelism.data_parallel_replicate_degree", 2),
}


def make(o: dict[str, Any]) -> Any:
    """The config of a variant."""
    config = train_titan.plain_tiny()
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    config.training.seq_len, config.training.local_batch_size = LENGTH, 1
    config.training.steps = o["steps"]
    config.dump_folder = o["folder"]
    config.debug.seed = 0
    for name in o["variant"].split():
        VARIANTS[name](config)
    world, dims = int(os.environ["WORLD_SIZE"]), config.parallelism
    config.parallelism.data_parallel_shard_degree = (
        world // dims.data_parallel_replicate_degree // dims.tensor_parallel_degree
    )
    if o.get("plain"):
        if o.get("microbatches"):  # of the whole job
            places = world // dims.tensor_parallel_degree
            assert o["microbatches"] * o["places"] % places == 0
            config.training.global_batch_size = o["microbatches"] * o["places"]
        return config
    config = fault_tolerant(config)
    config.fault_tolerance.microbatches = o.get("microbatches")
    config.fault_tolerance.sync = o.get("sync", "every")
    return config


# ---------------------------------------------------------------- what a rank tells of itself


def digest(model: nn.Module, optimizers: Any) -> str:
    """Of this rank's part of everything that is trained or balanced; the test's own, not the product's fingerprint."""
    hashed = hashlib.sha256()
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("expert_bias_E"))]
    for name, tensor in named:
        _add(hashed, name, tensor)
    for optimizer in optimizers:
        for name, parameter in named:
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                _add(hashed, f"{name} {key}", value)
    return hashed.hexdigest()[:16]


def _add(hashed: Any, name: str, value: Any) -> None:
    local = value._local_tensor if isinstance(value, DTensor) else torch.as_tensor(value)
    hashed.update(f"{name} {local.dtype} {tuple(local.shape)}".encode())
    hashed.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def weights(model: nn.Module) -> list[float]:
    """A few of each parameter's numbers."""
    with torch.no_grad():
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [float(x) for one in whole for x in one.flatten()[:4]]


def biases(model: nn.Module) -> list[list[float]]:
    """The bias of each layer's experts."""
    return [_whole(b).tolist() for n, b in model.named_buffers() if n.endswith("expert_bias_E")]


def counted(model: nn.Module) -> list[list[float]]:
    """The tokens of each layer's experts, as this rank holds them."""
    found = [b for n, b in model.named_buffers() if n.endswith("tokens_per_expert_E")]
    return [(b._local_tensor if isinstance(b, DTensor) else b).tolist() for b in found]


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


class Telling:
    """Puts its ears to a trainer.

    Args:
        o: the options.
    """

    def __init__(self, o: dict[str, Any]) -> None:
        self._o, self._trace = o, Trace(o["trace"])
        self._logged: dict[int, tuple[float, float]] = {}

    def attach(self, trainer: Any) -> None:
        """From now on every step is told."""
        self._trace("placed", dist.get_rank(), dist.get_process_group_ranks(None))
        step, log = trainer.train_step, trainer.metrics_processor.log

        def train_step(iterator: Any) -> None:
            run = getattr(trainer, "run", None)
            if run is not None:
                self._trace("begins", run.step.index, run.step.live, run.step.lead)
            step(iterator)
            self._tell(trainer)

        def logged(number: int, mean: float, highest: float, norm: float, **more: Any) -> None:
            self._logged[number] = (mean, norm)
            log(number, mean, highest, norm, **more)

        optimizer_step = trainer.optimizers.step

        def stepped() -> None:
            if found := counted(trainer.model_parts[0]):
                self._trace("loads", trainer.step - 1, found)
            optimizer_step()

        trainer.train_step, trainer.metrics_processor.log = train_step, logged
        trainer.optimizers.step = stepped
        if hasattr(trainer, "_microbatch"):
            microbatch = trainer._microbatch

            def computed(k: int) -> None:
                self._trace("forward", trainer.run.step.index, k)
                if not os.path.exists(self._o.get("hurry", os.devnull)):
                    time.sleep(self._o.get("delay", 0.0))
                microbatch(k)

            trainer._microbatch = computed
        self._trainer = trainer

    def _tell(self, trainer: Any) -> None:
        model, step = trainer.model_parts[0], trainer.step - 1
        run = getattr(trainer, "run", None)
        loss = self._logged[trainer.step][0] if run is None else run.losses()[0]
        self._trace.applied(step, model, trainer.optimizers, loss, of=digest)
        if trainer.step in self._logged:
            self._trace("gradient", step, self._logged[trainer.step][1])
        if found := biases(model):
            self._trace("biases", step, found)
        self._trace("rates", step, trainer.lr_schedulers.get_metrics())
        self._trace("seen", step, trainer.ntokens_seen)

    def done(self) -> None:
        """The loop has ended."""
        model = self._trainer.model_parts[0]
        self._trace("done", digest(model, self._trainer.optimizers), weights(model))


def run(options: dict[str, Any]) -> None:
    """Trains."""
    torch.set_num_threads(1)
    init_logger()
    titan.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)  # no last nap
    trainer = make(options).build()
    assert isinstance(trainer, FaultTolerantTrainer) != bool(options.get("plain"))
    telling = Telling(options)
    telling.attach(trainer)
    trainer.train()
    telling.done()
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
