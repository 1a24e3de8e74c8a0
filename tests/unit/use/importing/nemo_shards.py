"""neuronx-nemo-megatron's checkpoints made from Hugging Face models, by its layouts and not from our reader.

Layouts: collections/nlp/parts/nlp_overrides.py (`NLPCheckpointIO`), serialization.py (files of single tensors),
utils/model_utils.py (`inject_model_parallel_rank`), modules/common/megatron/transformer.py (`ParallelAttention`, which
has the queries apart where key/value heads are fewer), and PyTorch Lightning's `dump_checkpoint`. The tensors of a
layer are cut as Megatron-LM cuts them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.unit.use.importing import megatron_shards
from tests.unit.use.importing.checks import in_module

State = dict[str, Any]
NAME = "megatron_gpt--step=100-consumed_samples=3200.0.ckpt"


class TensorReference:
    """As NeMo has it."""

    def __init__(self, tid: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.tid, self.shape, self.dtype = tid, shape, dtype


class Source(megatron_shards.Source):
    """A model to be cut; `config`: NeMo's, without the degrees of parallelism."""

    def __init__(self, model: Any, config: State, *, multiple: int = 32) -> None:
        super().__init__(model, argparse.Namespace(), multiple=multiple)
        self.config = config

    def layer(self, i: int, tp: int, version: int) -> list[State]:
        ranks = super().layer(i, tp, version)
        if self.groups < self.heads:
            q, k, v = (self.weights[f"model.layers.{i}.self_attn.{name}_proj.weight"] for name in "qkv")
            pairs = torch.stack([each.unflatten(0, (self.groups, -1)) for each in (k, v)], dim=1).flatten(0, 2)
            for rank, query, key_value in zip(ranks, q.chunk(tp), pairs.chunk(tp), strict=True):
                del rank["qkv.weight"]
                rank |= {"query.weight": query, "key_value.weight": key_value}
        return ranks


def write(source: Source, folder: Path, *, tp: int = 1, pp: int = 1, xser: bool = False) -> Path:
    """The checkpoint of step 100, with what a training leaves in it beside weights."""
    degrees = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    for (rank, stage), state in megatron_shards.stage_states(source, "nemo", tp, pp, 1, 3).items():
        folders = {(False, False): "", (True, False): f"mp_rank_{rank:02d}"}
        path = folder / folders.get((tp > 1, pp > 1), f"tp_rank_{rank:02d}_pp_rank_{stage:03d}") / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        metric = {"meta": {"name": "reduced_train_loss", "reduce_fx": torch.mean}, "_class": "_ResultMetric"}
        saved: State = {
            "epoch": 0,
            "global_step": 100,
            "pytorch-lightning_version": "1.8.6",
            "loops": {"fit_loop": {"epoch_loop._results": {"items": metric}}},
            "state_dict": state["model"],
            "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}],
            "lr_schedulers": [{"last_epoch": 100}],
            "hparams_name": "cfg",
            "hyper_parameters": {"cfg": source.config | degrees},
        }
        if xser:
            path.with_name(f"{NAME}.tensors").mkdir()
            saved = referring(saved, path)
        with in_module("nemo.collections.nlp.parts.serialization", TensorReference):
            torch.save(saved, path)
    return folder


def referring(saved: State, path: Path) -> State:
    """With a reference for each tensor, which is saved in a file of its own."""
    numbers = iter(range(10**6))

    def transformed(value: Any) -> Any:
        if isinstance(value, Tensor):
            number = next(numbers)
            torch.save(value.clone(), path.with_name(f"{NAME}.tensors") / f"tensor_{number}.pt")
            return TensorReference(number, value.shape, value.dtype)
        if isinstance(value, dict):
            return {name: transformed(each) for name, each in value.items()}
        return [transformed(each) for each in value] if isinstance(value, list) else value

    found: State = transformed(saved)
    return found


def gpt_config(model: Any, **changes: Any) -> State:
    """As conf/megatron_gpt_config.yaml has it; keys that concern the training alone are left out."""
    config = model.config
    return {
        "encoder_seq_length": config.n_positions, "max_position_embeddings": "${.encoder_seq_length}",
        "num_layers": config.n_layer, "hidden_size": config.n_embd, "ffn_hidden_size": config.n_inner,
        "num_attention_heads": config.n_head, "init_method_std": 0.021, "hidden_dropout": 0.1,
        "attention_dropout": 0.1, "ffn_dropout": 0.1, "kv_channels": None, "apply_query_key_layer_scaling": True,
        "normalization": "layernorm", "layernorm_epsilon": config.layer_norm_epsilon,
        "make_vocab_size_divisible_by": 32, "bias_activation_fusion": True, "megatron_amp_O2": False,
        "share_embeddings_and_output_weights": config.tie_word_embeddings, "tokenizer": {"type": "GPT2BPETokenizer"},
    } | changes  # fmt: skip


def llama_config(model: Any, **changes: Any) -> State:
    """As conf/megatron_llama_config.yaml and megatron_llama_70b_config.yaml have it."""
    config = model.config
    groups = config.num_key_value_heads
    return {
        "encoder_seq_length": config.max_position_embeddings, "max_position_embeddings": config.max_position_embeddings,
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
        "init_method_std": 0.021, "hidden_dropout": 0, "attention_dropout": 0, "ffn_dropout": 0, "kv_channels": None,
        "normalization": "rmsnorm", "layernorm_epsilon": config.rms_norm_eps, "bias_activation_fusion": False,
        "share_embeddings_and_output_weights": config.tie_word_embeddings, "position_embedding_type": "rope",
        "rotary_percentage": 1, "activation": "swiglu", "transformer_block_type": "pre_ln", "has_bias": False,
        "num_kv_heads": groups if groups < config.num_attention_heads else None,
    } | changes  # fmt: skip
