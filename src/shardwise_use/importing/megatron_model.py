"""The tensors of Megatron-LM's models by role, and the canonical tensors that are made of them.

A role is such as `layers.3.qkv.weight`, for all the names that Megatron-LM and NeMo have had for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.canonical_tensors import canonical_shapes
from shardwise.checkpoint.format.writing import StreamedWeight
from shardwise.config import GPTConfig
from shardwise_use.importing.megatron_arguments import MegatronConfig, choose_vocabulary, read_megatron_arguments
from shardwise_use.importing.tensor_parallel_shards import TensorParallelShards
from shardwise_use.importing.torch_dcp import LazyTensor
from shardwise_use.sparse_models import MEGATRON_MODULES, MEGATRON_NAMES, megatron_module

_LAYER = re.compile(r"(?:encoder|transformer|decoder)\.layers\.(\d+)\.(.+)")
# Names of `megatron.legacy`, with its own older ones and NeMo's; of Megatron Core, without and with TransformerEngine.
_NAMES_IN_LAYER = (
    (r"input_(?:layer)?norm\.(weight|bias)", "input_norm"),
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)", "input_norm"),
    (r"(?:self_)?attention\.query_key_value\.(weight|bias)", "qkv"),
    (r"self_attention\.linear_qkv\.(weight|bias)", "qkv"),
    (r"self_attention\.query\.(weight|bias)", "query"),
    (r"self_attention\.key_value\.(weight|bias)", "key_value"),
    (r"self_attention\.q_layernorm\.(weight)", "q_norm"),
    (r"self_attention\.k_layernorm\.(weight)", "k_norm"),
    (r"(?:self_)?attention\.dense\.(weight|bias)", "dense"),
    (r"self_attention\.linear_proj\.(weight|bias)", "dense"),
    (r"post_attention_(?:layer)?norm\.(weight|bias)", "post_norm"),
    (r"pre_mlp_layernorm\.(weight|bias)", "post_norm"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)", "post_norm"),
    (r"mlp\.(?:dense_h_to_4h|linear_fc1)\.(weight|bias)", "fc1"),
    (r"mlp\.(?:dense_4h_to_h|linear_fc2)\.(weight|bias)", "fc2"),
    *MEGATRON_NAMES,
)
_NAMES_OUTSIDE = (
    (r"embedding\.word_embeddings\.(weight)", "word"),
    (r"embedding\.position_embeddings\.(weight)", "position"),
    (r"(?:word_embeddings_for_head|word_embeddings|output_layer)\.(weight)", "head"),
    (r"(?:encoder|transformer|decoder)\.final_(?:layer)?norm\.(weight|bias)", "final_norm"),
)
_HUGGING_FACE_LAYER = re.compile(r"(?:transformer\.h|model\.layers)\.(\d+)\.(.+)")
_MODULES = {
    "transformer.wte": ("word", "tokens"), "model.embed_tokens": ("word", "tokens"), "lm_head": ("head", "tokens"),
    "transformer.wpe": ("position", "copies"),
    "transformer.ln_f": ("final_norm", "copies"), "model.norm": ("final_norm", "copies"),
    "ln_1": ("input_norm", "copies"), "input_layernorm": ("input_norm", "copies"),
    "ln_2": ("post_norm", "copies"), "post_attention_layernorm": ("post_norm", "copies"),
    "attn.c_attn": ("qkv", "qkv"), "attn.c_proj": ("dense", "rows"),
    "self_attn.q_proj": ("qkv", "q"), "self_attn.k_proj": ("qkv", "k"), "self_attn.v_proj": ("qkv", "v"),
    "self_attn.o_proj": ("dense", "rows"),
    "self_attn.q_norm": ("q_norm", "copies"), "self_attn.k_norm": ("k_norm", "copies"),
    "mlp.c_fc": ("fc1", "columns"), "mlp.c_proj": ("fc2", "rows"),
    "mlp.gate_proj": ("fc1", "gate"), "mlp.up_proj": ("fc1", "up"), "mlp.down_proj": ("fc2", "rows"),
    "mlp.w1": ("fc1", "gate"), "mlp.w3": ("fc1", "up"), "mlp.w2": ("fc2", "rows"),
    **MEGATRON_MODULES,
}  # fmt: skip
"""Hugging Face's module, without its layer → the role above, and the way in which tensor-parallel ranks hold it."""
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
_ROLE_LAYER = re.compile(r"layers\.(\d+)\.")
NO_WEIGHTS = re.compile(r".*(_extra_state|rotary(_pos)?_emb\.inv_freq)")


def megatron_config(
    shards: TensorParallelShards, args: Mapping[str, Any], vocab_size: int | None, *, legacy: bool
) -> tuple[MegatronConfig, list[str]]:
    """The configuration of a Megatron-LM model, and notes on arguments without a counterpart; layers are counted."""
    padded = sum(len(part) for part in shards.parts("word.weight"))
    vocabulary = choose_vocabulary(args, padded, vocab_size, shards.where)
    config, notes = read_megatron_arguments(args, vocabulary, shards.where, legacy=legacy)
    layers = count_layers(shards.tensors, 0)
    if layers != config.num_hidden_layers:
        raise ConfigError(
            f"{shards.where} must have as many layers as its num_layers ({config.num_hidden_layers}), and it has "
            f"{layers}"
        )
    return config, notes


def megatron_weights(shards: TensorParallelShards, config: MegatronConfig, version: int = 3) -> list[StreamedWeight]:
    """The canonical weights of a Megatron-LM model, or a state of each; `version`: of the checkpoint."""
    if config.tie_word_embeddings:
        shards.require_tied("word.weight", "head.weight")
    return shards.weights(canonical_shapes(config), megatron_tensors(shards, config, version))


def megatron_tensors(shards: TensorParallelShards, config: MegatronConfig, version: int = 3) -> dict[str, LazyTensor]:
    """The canonical tensors of a Megatron-LM model by name."""
    return dict(_tensors(shards, config, version, canonical_shapes(config)))


def count_layers(names: Iterable[str], first: int) -> int:
    """The number of layers in a block of a Megatron-LM model that begins with layer `first`."""
    numbers = [int(match[1]) for name in names if (match := _ROLE_LAYER.match(name))]
    return max(numbers) + 1 - first if numbers else 0


def megatron_role(name: str, first: int) -> str | None:
    """The name of a Megatron-LM tensor by layer and role, such as `layers.3.qkv.weight`; None if it has no role."""
    prefix = ""
    patterns: Sequence[tuple[str, str]] = _NAMES_OUTSIDE
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        prefix = f"layers.{first + int(layer[1])}."
        patterns = _NAMES_IN_LAYER
        name = layer[2]
    for pattern, role in patterns:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return f"{prefix}{match.expand(role)}.{match[match.re.groups]}"
    return None


def _tensors(
    shards: TensorParallelShards, config: MegatronConfig, version: int, names: Iterable[str]
) -> Iterator[tuple[str, LazyTensor]]:
    # Q, K and V, or gate and up, are asked for one by one and cut from one tensor.
    query_key_value = functools.cache(functools.partial(_query_key_value, shards, config, version))
    gate_up = functools.cache(shards.split)
    for name in names:
        path, _, kind = name.rpartition(".")
        layer = _HUGGING_FACE_LAYER.fullmatch(path)
        if layer is None:
            role, cut = _MODULES[path]
            source = f"{role}.{kind}"
        else:
            begin, module, width = megatron_module(layer[2], config)
            role, cut = _MODULES[module]
            source = f"layers.{layer[1]}.{begin}{role}.{kind}"
        if cut == "copies" or (cut == "rows" and kind == "bias"):
            tensor = shards.copies(source)
        elif cut == "rows":
            tensor = shards.rows(source)
        elif cut == "columns":
            tensor = shards.columns(source)
        elif cut == "tokens":
            # The rows of padding are the last ones.
            tensor = shards.columns(source).rows(0, config.vocab_size)
        elif cut in ("gate", "up"):
            gate, up = gate_up(source, (width // shards.ranks,) * 2)
            tensor = gate if cut == "gate" else up
        # Q, K and V: all of them in a GPT-2, or a single one in a Llama.
        else:
            tensor = LazyTensor.cat([query_key_value(source)["qkv".index(letter)] for letter in cut])
        # Hugging Face's GPT-2 has the matrices of its layers as [in, out].
        is_transposed = isinstance(config, GPTConfig) and layer and kind == "weight" and cut != "copies"
        yield name, (tensor.t if is_transposed else tensor)


def _query_key_value(shards: TensorParallelShards, config: MegatronConfig, version: int, name: str) -> list[LazyTensor]:
    if shards.has(name.replace("qkv", "query")):
        return _separate_queries(shards, config, name)
    n = config.num_attention_heads
    g = config.num_key_value_heads
    d = config.head_dim
    ranks = shards.ranks
    fused = shards.columns(name)
    rows = (n + 2 * g) * d
    if fused.shape[0] != rows or (version < 2 and (g != n or n % ranks)):
        requirement = f"{rows} rows over {ranks} tensor-parallel ranks, of {n} query and {g} key/value heads"
        raise shards.misshapen(name, fused.shape, requirement)
    if version == 0:
        return shards.split(name, [n * d // ranks] * 3)
    if version == 1:
        local = [part.read().unflatten(0, (-1, 3)) for part in shards.parts(name)]
        return [LazyTensor.cat([LazyTensor.of(part[:, i]) for part in local]) for i in range(3)]
    # Each group of rows has its queries, its key and its value.
    group_rows = rows // g
    query_stop = group_rows - 2 * d
    key_stop = group_rows - d
    parts_of_group = ((0, query_stop), (query_stop, key_stop), (key_stop, group_rows))
    return [
        LazyTensor.cat([fused.rows(group * group_rows + start, group * group_rows + stop) for group in range(g)])
        for start, stop in parts_of_group
    ]


def _separate_queries(shards: TensorParallelShards, config: MegatronConfig, name: str) -> list[LazyTensor]:
    """Q, K and V where the queries are a tensor of their own: K and V alternate head by head in another one."""
    g = config.num_key_value_heads
    d = config.head_dim
    key_value_name = name.replace("qkv", "key_value")
    key_value = shards.columns(key_value_name)
    if key_value.shape[0] != 2 * g * d:
        requirement = f"{2 * g * d} rows over all tensor-parallel ranks, of {g} key/value heads"
        raise shards.misshapen(key_value_name, key_value.shape, requirement)
    heads = [key_value.rows(head * d, (head + 1) * d) for head in range(2 * g)]
    return [shards.columns(name.replace("qkv", "query")), LazyTensor.cat(heads[::2]), LazyTensor.cat(heads[1::2])]
