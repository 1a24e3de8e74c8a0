"""torchtitan trains a tiny model on two gloo ranks and saves it: `torchrun … maker.py SPEC.json`.

Their model, FSDP2 wrapping, optimizer, schedule, clipping, loss and checkpointer; the loop around them is this file's,
because their trainer asks for the memory of a GPU. Attention is their `ScaledDotProductAttention`: the attention of
their recipes needs a GPU or a compiler.
"""

# ruff: noqa: E402

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

# Kernels of experts, which no CPU runs, are imported with every model of theirs.
sys.modules["torchtitan.distributed.minimal_async_ep"] = MagicMock()
torch._utils._get_available_device_type = lambda: "cpu"  # what they ask instead of naming "cuda"

import numpy as np
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import attention
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

VOCABULARY, WIDTH, LENGTH = 128, 64, 32


def model_config(spec: dict[str, Any]) -> Any:
    for module in (llama3, qwen3):
        module.get_attention_config = lambda backend: attention.ScaledDotProductAttention.Config()
    common = {
        "dim": WIDTH, "vocab_size": VOCABULARY, "enable_weight_tying": spec["tied"],
        "tok_embeddings": llama3.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH,
            param_init=llama3._EMBEDDING_SKIP_INIT if spec["tied"] else llama3._EMBEDDING_INIT,
        ),
        "norm": llama3.RMSNorm.Config(
            normalized_shape=WIDTH, eps=1e-5 if spec["family"] == "llama3" else 1e-6, param_init=llama3._NORM_INIT
        ),
        "lm_head": llama3.Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH)
        ),
    }  # fmt: skip
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "attn_backend": "sdpa"}
    if spec["family"] == "llama3":
        rope = ComplexRoPE.Config(dim=16, max_seq_len=131072, theta=500000, scaling="llama")
        layers = llama3._build_llama3_layers(**sizes, rope=rope, fuse_qkv=spec["fused"])
        return llama3.Llama3Model.Config(**common, layers=layers)
    rope = CosSinRoPE.Config(dim=24, max_seq_len=4096, theta=1000000.0)
    layers = qwen3._build_qwen3_layers(**sizes, head_dim=24, rope=rope)
    return qwen3.Qwen3Model.Config(**common, layers=layers)


def batches(spec: dict[str, Any]) -> torch.Tensor:
    """[steps, sequences, ids] of this rank: its half of each global batch."""
    whole = torch.from_numpy(np.load(spec["batches"]))
    return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class TrainState:
    step = 0
    ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Loader:
    """Its state is that of torchdata's loader: pickled bytes by rank."""

    def state_dict(self) -> dict[str, Any]:
        import pickle

        return {f"dp_rank_{dist.get_rank()}": pickle.dumps({"position": 3}), "world_size": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def saved_by_its_manager(folder: str, every: int, model: Any, optimizers: Any, **parts: Any) -> CheckpointManager:
    config = CheckpointManager.Config(enable=True, folder="checkpoint", interval=every, last_save_model_only=False)
    return config.build(
        dataloader=Loader(), model_parts=[model], optimizers=optimizers, sd_adapter=None, base_folder=folder, **parts
    )


def save_sparse(folder: str) -> None:
    """Save a Qwen 3 with experts, which no CPU trains there, after two updates; and its tensors by HF's names."""
    from safetensors.torch import save_file

    dist.init_process_group("gloo")
    rope = CosSinRoPE.Config(dim=24, max_seq_len=4096, theta=1000000.0)
    config = model_config({"family": "qwen3", "fused": False, "tied": False})
    config.layers = qwen3._build_qwen3_moe_layers(
        n_layers=2, dim=WIDTH, n_heads=4, n_kv_heads=2, head_dim=24, moe_hidden_dim=48, num_experts=4, top_k=2,
        fuse_qkv=False, attn_backend="sdpa", moe_comm_backend="standard", rope=rope,
    )  # fmt: skip
    torch.manual_seed(7)
    model = config.build()
    optimizer_config = default_adamw(lr=3e-3)
    optimizer_config.implementation = "for-loop"
    optimizers = optimizer_config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=20)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        optimizers.step()
        schedulers.step()
    state = TrainState()
    state.step = 2
    manager = saved_by_its_manager(
        folder, 2, model, optimizers, lr_schedulers=schedulers, states={"train_state": state}
    )
    manager.save(2)
    adapter = qwen3.Qwen3StateDictAdapter(config, None)
    named = dict(model.named_parameters())
    whole = {"model": {name: weight.detach() for name, weight in named.items()}}
    (optimizer,) = optimizers.optimizers
    for moment in ("exp_avg", "exp_avg_sq"):
        whole[moment] = {name: optimizer.state[weight][moment] for name, weight in named.items()}
    theirs = {
        f"{state} {name}": tensor.contiguous()
        for state, tensors in whole.items()
        for name, tensor in adapter.to_hf(tensors).items()
    }
    save_file(theirs, Path(folder, "theirs.safetensors"))
    dist.destroy_process_group()


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    dist.init_process_group("gloo")
    parallelism = ParallelismConfig(data_parallel_shard_degree=dist.get_world_size(), spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    training = TrainingConfig(
        local_batch_size=2, seq_len=LENGTH, steps=spec["steps"], max_norm=spec["max_norm"],
        mixed_precision_param="float32", mixed_precision_reduce="float32",
    )  # fmt: skip
    torch.manual_seed(7)
    with torch.device("meta"):
        model = model_config(spec).build()
    parallelize = llama3.parallelize_llama if spec["family"] == "llama3" else qwen3.parallelize_qwen3
    model = parallelize(
        model, parallel_dims=dims, training=training, parallelism=parallelism,
        compile_config=CompileConfig(), ac_config=None, dump_folder=spec["folder"],
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device="cpu")
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.mul_(1.5)  # so that the decay of norms is seen
    model.train()
    optimizer_config = default_adamw(lr=3e-3)
    optimizer_config.implementation = "for-loop"
    optimizers = optimizer_config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(**spec["schedule"]).build(
        optimizers=optimizers, training_steps=spec["steps"]
    )
    loss_function = CrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=VOCABULARY))
    state = TrainState()
    manager = saved_by_its_manager(
        spec["folder"], spec["save_at"], model, optimizers, lr_schedulers=schedulers,
        states={"train_state": state},
    )  # fmt: skip
    losses: list[float] = []
    for batch in batches(spec):
        state.step += 1
        optimizers.zero_grad()
        inputs, labels = batch[:, :-1], batch[:, 1:]
        state.ntokens_seen += labels.numel()
        count = torch.tensor(float(labels.numel() * dist.get_world_size()))
        loss, _ = loss_function(model(inputs, attention_masks=None), labels, count)
        loss.backward()
        dist_utils.clip_grad_norm_(list(model.parameters()), training.max_norm, foreach=True)
        optimizers.step()
        schedulers.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(float(loss))
        manager.save(state.step)
    if dist.get_rank() == 0:
        Path(spec["folder"], "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1].endswith(".json") else save_sparse(sys.argv[1])
