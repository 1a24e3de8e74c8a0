"""neuronx-nemo-megatron's checkpoints made from Hugging Face models, by its layouts and not from our reader.

Layouts: collections/nlp/parts/nlp_overrides.py (`NLPCheckpointIO`), serialization.py (files of single tensors),
utils/model_utils.py (`inject_model_parallel_rank`), modules/common/megatron/transformer.py (`ParallelAttention`, which
has the queries apart where key/value heads are fewer), and PyTorch Lightning's `dump_checkpoint`. The tensors of a
layer are cut as Megatron-LM cuts them.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from tests.unit.use.importing import megatron_shards, zero_shards

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


REFERENCE = (
    "nemo.collections.nlp.parts.serialization",
    TensorReference,
    lambda number, tensor: TensorReference(number, tensor.shape, tensor.dtype),
)


def write(
    source: Source, folder: Path, *, tp: int = 1, pp: int = 1, xser: bool = False,
    moments: tuple[Source, Source] | None = None, name: str = NAME, beside: State | None = None, **options: Any,
) -> Path:  # fmt: skip
    """The checkpoint of step 100, with what a training leaves in it beside weights.

    moments: models whose weights are the optimizer's state; `options` as of `state_dicts`. beside: other content.
    """
    degrees = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    reference = REFERENCE if xser else None
    both = [megatron_shards.stage_states(each, "nemo", tp, pp, 1, 3) for each in moments or ()]
    masters = options.pop("masters", None)
    own = None if masters is None else megatron_shards.stage_states(masters, "nemo", tp, pp, 1, 3)
    for (rank, stage), state in megatron_shards.stage_states(source, "nemo", tp, pp, 1, 3).items():
        folders = {(False, False): "", (True, False): f"mp_rank_{rank:02d}"}
        path = folder / folders.get((tp > 1, pp > 1), f"tp_rank_{rank:02d}_pp_rank_{stage:03d}") / name
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
            **(beside or {}),
        }
        if moments is not None:
            buffers = {"untrained_buffer_names", *state["model"]["untrained_buffer_names"]}
            pairs = {
                each: (both[0][rank, stage]["model"][each], both[1][rank, stage]["model"][each])
                for each in state["model"] if each not in buffers
            }  # fmt: skip
            states = zero_shards.state_dicts(pairs, own and own[rank, stage]["model"], **options)
            if options.get("dp", 2) is None:
                saved["optimizer_states"] = states
            else:
                del saved["optimizer_states"]
                ends = "-optimizer_states-last.ckpt" if name.endswith("-last.ckpt") else "-optimizer_states.ckpt"
                own_name = name.removesuffix("-last.ckpt").removesuffix(".ckpt") + ends
                for data, each in enumerate(states):
                    zero_shards.save([each], path.parent / f"optim/dp_rank_{data:03d}" / own_name, reference)
        zero_shards.save(saved, path, reference)
    return folder


def gpt_config(model: Any, **changes: Any) -> State:
    return megatron_shards.settings_of("nemo gpt", model, **changes)


def llama_config(model: Any, **changes: Any) -> State:
    groups = model.config.num_key_value_heads
    own = {"num_kv_heads": groups if groups < model.config.num_attention_heads else None}
    return megatron_shards.settings_of("nemo llama", model, **own | changes)
