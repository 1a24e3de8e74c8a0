"""The same Llama trained by shardwise and by its alternatives, behind one interface.

A contestant is made (imports, processes joined, model built), then prepared (wrappers and optimizer), then steps.
All hold the same weights at the start, see the same tokens, and update by AdamW with the same options. HF stands for
Hugging Face's transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config import CompileConfig, LlamaConfig
from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh, join
from shardwise.layers.execution import Execution, made_with
from shardwise.models.llama import Llama
from shardwise.optim.zero import ZeroRedundancyOptimizer

MODEL = LlamaConfig(
    family="llama",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=256,
)
SEQUENCE_LENGTH = 256
SEQUENCES_PER_RANK = 16
SEED = 1
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


class Contestant(Protocol):
    """`whole_batch`: every rank computes on the sequences of all ranks (tensor parallelism)."""

    whole_batch: bool

    def prepare(self) -> None: ...

    def step(self, ids_BS: Tensor) -> float:
        """One optimizer step; the mean loss of this rank's tokens."""
        ...

    def collective_seconds(self) -> float | None:
        """Seconds in collectives so far, where they can be told."""
        ...


class Shardwise:
    """Our model and optimizer.

    `mkl`: matmuls by torch's own operators, as the alternatives have them. `compiled`: as with compile.enabled=true.
    `mixed`: bfloat16 with float32 gradients and masters, as with precision.mode=mixed.
    """

    def __init__(
        self,
        *,
        tensor: int = 1,
        sequence: bool = False,
        mkl: bool = False,
        compiled: bool = False,
        mixed: bool = False,
    ) -> None:
        if mkl:
            devices.cpu_prefers_onednn = lambda: False  # type: ignore[assignment]
        join()
        self.mesh = Mesh(tensor=tensor)
        self.whole_batch = tensor > 1
        dtype = torch.bfloat16 if mixed else torch.float32
        compiler = None
        if compiled:
            from shardwise.train.compile.compiled_units import Compilation

            compiler = Compilation(CompileConfig(enabled=True), self.mesh.device, MODEL, [self.mesh.tp])
        with made_with(Execution(compiler=compiler)):
            self.model = Llama(MODEL, self.mesh.tp, sequence_parallel=sequence, seed=SEED, dtype=dtype)

    def prepare(self) -> None:
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            mesh=self.mesh,
            grad_clipping=False,
            gradient_dtype=torch.float32,
            reduce_dtype=torch.float32,
            **ADAMW,
        )
        for group in self.mesh.groups:
            group.meter.spans = []

    def step(self, ids_BS: Tensor) -> float:
        ids_SB = ids_BS.t().contiguous()
        targets_SB = torch.cat((ids_SB[1:], torch.full_like(ids_SB[:1], -100)))
        with self.optimizer.accumulate(last=True):
            loss = self.model(ids_SB, targets_SB) / ids_SB[1:].numel()
            loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def collective_seconds(self) -> float:
        return sum(group.meter.seconds for group in self.mesh.groups)


class Transformers:
    """Hugging Face's model; `wrap` distributes it before the optimizer is made."""

    whole_batch = False

    def __init__(self, folder: str, **loading: Any) -> None:
        from transformers import LlamaForCausalLM

        dist.init_process_group("gloo")
        self.model: Any = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", **loading
        ).train()

    def wrap(self) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        from torch.distributed.tensor import DTensor

        self.wrap()
        # One fused call takes tensors of one kind; a model that is cut in part holds both.
        parameters = list(self.model.parameters())
        kinds = [[p for p in parameters if isinstance(p, DTensor) == cut] for cut in (True, False)]
        self.optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], **ADAMW)

    def step(self, ids_BS: Tensor) -> float:
        loss = self.model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def collective_seconds(self) -> None:
        return None


class DistributedDataParallel(Transformers):
    """Under torch DDP, with its defaults."""

    def wrap(self) -> None:
        self.model = torch.nn.parallel.DistributedDataParallel(self.model)


class CompiledDataParallel(Transformers):
    """Compiled whole by torch.compile, under torch DDP, with the defaults of both."""

    def wrap(self) -> None:
        self.model = torch.nn.parallel.DistributedDataParallel(torch.compile(self.model))


class Autocast(DistributedDataParallel):
    """In bfloat16 by torch.autocast, with float32 weights."""

    def step(self, ids_BS: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return super().step(ids_BS)


class CompiledAutocast(CompiledDataParallel, Autocast):
    """The same, compiled whole."""


class FullyShard(Transformers):
    """Under torch FSDP2, one unit a layer and one for the rest."""

    def wrap(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class TensorPlan(Transformers):
    """By transformers' own tensor parallelism, `tp_plan="auto"`."""

    whole_batch = True

    def __init__(self, folder: str) -> None:
        # Newer releases of transformers 5 take the plan in a configuration object and warn about the older way.
        try:
            from transformers.distributed import DistributedConfig

            loading: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")}
        except ImportError:
            loading = {"tp_plan": "auto"}
        super().__init__(folder, **loading)

    def wrap(self) -> None:
        """Loading cut it already."""


CONTESTANTS: dict[str, tuple[str, Callable[[str], Contestant]]] = {
    "zero1": ("shardwise DP 2, ZeRO-1", lambda folder: Shardwise()),
    "zero1_mkl": ("shardwise DP 2, ZeRO-1, MKL matmuls", lambda folder: Shardwise(mkl=True)),
    "zero1_compiled": ("shardwise DP 2, ZeRO-1, compiled", lambda folder: Shardwise(compiled=True)),
    "zero1_mkl_compiled": (
        "shardwise DP 2, ZeRO-1, MKL matmuls, compiled",
        lambda folder: Shardwise(mkl=True, compiled=True),
    ),
    "ddp": ("HF, torch DDP", DistributedDataParallel),
    "ddp_compiled": ("HF, torch DDP, compiled", CompiledDataParallel),
    "zero1_mixed": ("shardwise DP 2, ZeRO-1, mixed", lambda folder: Shardwise(mixed=True)),
    "zero1_mixed_compiled": ("shardwise DP 2, ZeRO-1, mixed, compiled", lambda _: Shardwise(mixed=True, compiled=True)),
    "ddp_autocast": ("HF, torch DDP, bfloat16 autocast", Autocast),
    "ddp_autocast_compiled": ("HF, torch DDP, bfloat16 autocast, compiled", CompiledAutocast),
    "fsdp2": ("HF, torch FSDP2", FullyShard),
    "tp": ("shardwise TP 2", lambda folder: Shardwise(tensor=2)),
    "tp_mkl": ("shardwise TP 2, MKL matmuls", lambda folder: Shardwise(tensor=2, mkl=True)),
    "tp_compiled": ("shardwise TP 2, compiled", lambda folder: Shardwise(tensor=2, compiled=True)),
    "tp_sp": ("shardwise TP 2 + SP", lambda folder: Shardwise(tensor=2, sequence=True)),
    "tp_plan": ('HF, tp_plan="auto" at 2 ranks', TensorPlan),
}
"""Name -> (how tables call it, how to make it from the folder of the starting weights)."""


def batch(step: int, rank: int, whole: bool, world: int) -> Tensor:
    """Token ids `[B, S]` of a step: all ranks' sequences, or this rank's part of them."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(MODEL.vocab_size, (world * SEQUENCES_PER_RANK, SEQUENCE_LENGTH), generator=generator)
    return ids if whole else ids[rank * SEQUENCES_PER_RANK : (rank + 1) * SEQUENCES_PER_RANK]


def make(name: str, folder: str) -> Contestant:
    """In a rank's process: the contestant, with its model built."""
    warnings.simplefilter("ignore")
    return CONTESTANTS[name][1](folder)
