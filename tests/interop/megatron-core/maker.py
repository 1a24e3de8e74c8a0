"""Megatron Core trains on gloo ranks, saves as Megatron-LM does, and goes on: `torchrun … maker.py SPEC.json`.

Megatron Core's optimizers name the device "cuda" in their code. `Pretended` answers for it with the CPU, so that what
runs is their own arithmetic, their own buffers and their own saver. What `megatron.training` adds around a checkpoint
(arguments, iteration, scheduler, generators) is written here under the same names.
"""

import argparse
import contextlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class Pretended(TorchFunctionMode):
    """Tensors of the device "cuda" are made on the CPU, and float tensors call themselves those of CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


def pretend() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    Pretended().__enter__()


OF_CONFIG = (
    "num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "normalization",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "init_method_std", "bf16", "params_dtype",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "sequence_parallel",
    "moe_router_topk", "moe_ffn_hidden_size", "moe_aux_loss_coeff", "moe_router_load_balancing_type",
    "moe_z_loss_coeff", "moe_router_pre_softmax", "moe_layer_freq",
)  # fmt: skip
"""What a configuration names as the arguments do."""


def arguments(spec: dict[str, Any]) -> argparse.Namespace:
    """Megatron-LM's arguments, with what a file of data cannot hold."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        **spec["args"],
        params_dtype=torch.float32,
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        world_size=dist.get_world_size(),
    )


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **{name: getattr(args, name) for name in OF_CONFIG},
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        gated_linear_unit=args.swiglu, activation_func=F.silu if args.swiglu else F.gelu,
        layernorm_epsilon=args.norm_epsilon, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        pipeline_dtype=args.params_dtype, num_moe_experts=args.num_experts,
        apply_rope_fusion=False, persist_layer_norm=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, batch_p2p_comm=True, deallocate_pipeline_outputs=False,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
        if args.num_experts
        else get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )
    if args.bf16:
        model = model.bfloat16()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, ddp, model)


def optimizer_of(model: torch.nn.Module, args: argparse.Namespace):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    names = ("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    names += ("bf16", "params_dtype", "use_distributed_optimizer")
    config = OptimizerConfig(**{name: getattr(args, name) for name in names})
    optimizer = get_megatron_optimizer(config, [model])
    # As megatron/training/training.py counts: in samples.
    samples = args.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=args.lr_warmup_init, max_lr=args.lr, min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * samples, lr_decay_steps=args.lr_decay_iters * samples,
        lr_decay_style=args.lr_decay_style, start_wd=args.start_weight_decay, end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters * samples, wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=args.lr_wsd_decay_iters and args.lr_wsd_decay_iters * samples,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )  # fmt: skip
    return optimizer, scheduler


def train_step(model, optimizer, scheduler, args, tokens: torch.Tensor) -> float:
    """One step on [samples, sequence + 1] tokens; the loss is known on the last stage."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ranks = parallel_state.get_data_parallel_world_size()
    own = tokens.chunk(ranks)[parallel_state.get_data_parallel_rank()]
    batches = own.split(args.micro_batch_size)
    length = own.shape[1] - 1
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    positions = torch.arange(length).expand(args.micro_batch_size, -1)

    def forward(iterator, model):
        batch = next(iterator)
        losses = model(batch[:, :-1], positions, mask, labels=batch[:, 1:])
        return losses, lambda output: (output.float().mean(), {"loss": output.float().mean().detach()})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    model.config.finalize_model_grads_func = finalize_model_grads
    losses = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(batches), model=[model], num_microbatches=len(batches),
        seq_length=length, micro_batch_size=args.micro_batch_size, forward_only=False,
    )  # fmt: skip
    optimizer.step()
    scheduler.step(args.global_batch_size)
    if not losses:
        return float("nan")
    mean = torch.stack([loss["loss"] for loss in losses]).mean()
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return float(mean) / ranks


def save(folder: Path, model, optimizer, scheduler, args, iteration: int, sharding: str | None) -> None:
    """As `save_checkpoint` and `generate_state_dict` of megatron/training/checkpointing.py write `torch_dist`."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer and sharding is not None:
        metadata["distrib_optim_sharding_type"] = sharding
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = True
    args.iteration = iteration
    args.consumed_train_samples = iteration * args.global_batch_size
    sharded = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), **metadata}
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    state["model"] = model.module.sharded_state_dict(metadata=sharded)
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=sharded)
    state["opt_param_scheduler"] = scheduler.state_dict()
    rng = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
           "torch_rng_state": torch.get_rng_state(), "cuda_rng_state": torch.get_rng_state(),
           "rng_tracker_states": {}}  # fmt: skip
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    place = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    state["rng_state"] = ShardedObject(
        "rng_state", [rng], (pipeline, tensor), place, replica_id=parallel_state.get_data_parallel_rank()
    )
    state["num_floating_point_operations_so_far"] = 0
    target = folder / f"iter_{iteration:07d}"
    target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def main(spec: dict[str, Any]) -> None:
    pretend()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    args = arguments(spec)
    # Without TransformerEngine its name is missing there.
    vars(moe_utils).setdefault("te_general_gemm", None)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        create_gloo_process_groups=True,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    args.data_parallel_size = parallel_state.get_data_parallel_world_size()
    torch.manual_seed(args.seed)
    tensor_parallel.random.initialize_rng_tracker()
    # Its states are those of a device, and nothing here is drawn after initialisation.
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    model = model_of(args)
    optimizer, scheduler = optimizer_of(model, args)
    tokens = torch.from_numpy(np.load(spec["batches"]).astype(np.int64))
    losses = []
    for step, batch in enumerate(tokens, 1):
        losses.append(train_step(model, optimizer, scheduler, args, batch))
        if step == spec["save_at"]:
            for name, sharding in spec["saves"].items():
                save(Path(name), model, optimizer, scheduler, args, step, sharding)
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        Path(spec["folder"], "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
