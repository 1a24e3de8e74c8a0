"""Megatron-LM's checkpoints in its `torch` format: GPT-2 and Llama models, from `megatron.legacy` or Megatron Core.

    SOURCE/latest_checkpointed_iteration.txt           a number, or "release"
    SOURCE/iter_0000100/mp_rank_TT/model_optim_rng.pt          tensor-parallel rank TT
    SOURCE/iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt      and pipeline stage PPP

As megatron/training/checkpointing.py writes them, and tools/checkpoint/{loader_base,schema_core}.py read them. A file
holds "args", "checkpoint_version" and the state of "model", or of "model0", "model1", … with virtual stages: chunk v
of stage p is block v·P + p of the layers, which are counted from 0 in each. Column-parallel weights are cut by rows,
row-parallel ones by columns, and SwiGLU's first layer has a rank's gate above its up projection. Legend: n heads, g
query groups, d head size; the fused Q, K and V have, by checkpoint version,

    0          [3, n, d] on each rank
    1          [n, d, 3] on each rank
    2 and 3    [g, (n/g + 2)·d] over all ranks: the queries of a group, its key, its value

NeMo's models have the names of `megatron.legacy` after the prefix `model.`. Where g < n, their queries are a tensor
of their own, and another one has keys and values as [g, 2, d].

The arguments describe the model, by the names and defaults of megatron/training/arguments.py, older spellings
included. All that would make another model are reported at once; those that only concern training are ignored.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from shardwise.base.errors import ConfigError, listing
from shardwise.checkpoint.format.config_json import validated
from shardwise.checkpoint.importing import pickled
from shardwise.checkpoint.importing.foreign_model import ForeignModel, canonical_shapes
from shardwise.checkpoint.importing.tensor_parallel_shards import Shards, Stacked, require_ranks, stack
from shardwise.config import GPTConfig, LlamaConfig

RankStates: TypeAlias = Mapping[tuple[int, int], Mapping[str, Any]]
"""(tensor-parallel rank, pipeline stage) → content of its file."""
_TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_RANK_NAMES = ("mp_rank_{:02d}", "mp_rank_{:02d}_{:03d}")  # without and with pipeline stages
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_VERSIONS = (0, 1, 2, 3)
_MOST_RANKS = 2**20
"""More ranks than any machine has: a wrong degree must not make a list of all of them."""
_SHOWN = 8

_LAYER = re.compile(r"(?:encoder|transformer|decoder)\.layers\.(\d+)\.(.+)")
# Names of `megatron.legacy`, with its own older ones and NeMo's; of Megatron Core, without and with TransformerEngine.
_NAMES_IN_LAYER = (
    (r"input_(?:layer)?norm\.(weight|bias)", "input_norm"),
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)", "input_norm"),
    (r"(?:self_)?attention\.query_key_value\.(weight|bias)", "qkv"),
    (r"self_attention\.linear_qkv\.(weight|bias)", "qkv"),
    (r"self_attention\.query\.(weight|bias)", "query"),
    (r"self_attention\.key_value\.(weight|bias)", "key_value"),
    (r"(?:self_)?attention\.dense\.(weight|bias)", "dense"),
    (r"self_attention\.linear_proj\.(weight|bias)", "dense"),
    (r"post_attention_(?:layer)?norm\.(weight|bias)", "post_norm"),
    (r"pre_mlp_layernorm\.(weight|bias)", "post_norm"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)", "post_norm"),
    (r"mlp\.(?:dense_h_to_4h|linear_fc1)\.(weight|bias)", "fc1"),
    (r"mlp\.(?:dense_4h_to_h|linear_fc2)\.(weight|bias)", "fc2"),
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
    "mlp.c_fc": ("fc1", "columns"), "mlp.c_proj": ("fc2", "rows"),
    "mlp.gate_proj": ("fc1", "gate"), "mlp.up_proj": ("fc1", "up"), "mlp.down_proj": ("fc2", "rows"),
}  # fmt: skip
"""Hugging Face's module, without its layer → the role above, and the way in which tensor-parallel ranks hold it."""
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
_ROLE_LAYER = re.compile(r"layers\.(\d+)\.")
_NO_WEIGHTS = re.compile(r".*(_extra_state|rotary(_pos)?_emb\.inv_freq)")


def open_megatron(source: Path, vocab_size: int | None = None, *, allow_drift: bool = False) -> ForeignModel:
    """The model in a Megatron-LM checkpoint.

    Args:
        source: the folder of the checkpoint, or of one iteration.
        vocab_size: number of tokens without padding, where the checkpoint lacks it.
        allow_drift: the first of several replicas is taken although others differ.

    Raises:
        ConfigError: it is none, of another model than GPT-2 or Llama, incomplete, or contradicts itself: everything
        that is wrong; or its files are not safe to open.
    """
    folder = _iteration(source)
    states = {rank: _open(file) for rank, file in _ranks(folder).items()}
    return combined(states, folder, vocab_size, _RANK_NAMES, allow_drift=allow_drift)


def combined(
    states: RankStates,
    folder: Path,
    vocab_size: int | None,
    rank_names: tuple[str, str],
    *,
    allow_drift: bool,
) -> ForeignModel:
    """The model of which each rank holds a part, as Megatron-LM's files have it.

    Args:
        states: content of the ranks' files.
        folder: folder of the source, for messages.
        vocab_size: as in `open_megatron`.
        allow_drift: as in `open_megatron`.
        rank_names: formats of the ranks' names, without and with pipeline stages.
    """
    args, version = _common_arguments(states, folder)
    tensor, pipeline = _degrees(args, set(states), folder, rank_names)
    shards = Shards(str(folder), tensor, allow_drift)
    _add_tensors(states, shards, pipeline)
    if not shards.has("word.weight"):
        raise ConfigError(shards.problems or f"{folder} lacks its word embeddings")
    padded = sum(len(part) for part in shards.tensors["word.weight"])
    vocabulary = choose_vocabulary(args, padded, vocab_size, str(folder))
    config, notes = read_args(args, vocabulary, str(folder), legacy=_is_legacy(states))
    layers = _count_layers(shards.tensors, 0)
    if layers != config.num_hidden_layers:
        raise ConfigError(
            f"{folder} must have as many layers as its num_layers ({config.num_hidden_layers}), and it has {layers}"
        )
    if config.tie_word_embeddings:
        shards.require_tied("word.weight", "head.weight")
    shapes = canonical_shapes(config)
    weights = shards.weights(shapes, dict(_tensors(shards, config, version, shapes)))
    layout = {"tensor": tensor, "pipeline": pipeline}
    return ForeignModel(config, weights, layout, tokens=_NO_TOKENS, notes=[*notes, *shards.notes])


# ---- files


def _iteration(source: Path) -> Path:
    """The folder with the ranks' folders."""
    if not source.is_dir():
        raise ConfigError(f"{source} must be the folder of a Megatron-LM checkpoint: there is no folder of that name")
    tracker = source / _TRACKER
    if not tracker.is_file():
        return source
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        raise ConfigError(f"{tracker} must hold the number of an iteration or 'release', and it holds {text[:40]!r}")
    folder = source / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ConfigError(f"{tracker} names iteration {text}, and there is no folder {folder}")
    return folder


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """(tensor-parallel rank, pipeline stage) → its file."""
    ranks: dict[tuple[int, int], Path] = {}
    problems: list[str] = []
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match is None:
            continue
        if match[3]:
            raise ConfigError(f"{folder} is of a model with experts ({path.name}), and no family here has them")
        if files := [path / name for name in _FILES if (path / name).is_file()]:
            ranks[int(match[1]), int(match[2] or 0)] = files[0]
        else:
            problems.append(f"{path} must hold {listing(_FILES, 'or')}, and it holds neither")
    if problems:
        raise ConfigError(problems)
    if not ranks:
        hint = ""
        if (folder / ".metadata").exists() or (folder / "metadata.json").exists():
            hint = ": it is in a distributed format, so write it again by Megatron-LM with --ckpt-format torch"
        raise ConfigError(f"{folder} must hold folders mp_rank_00, mp_rank_01, … or mp_rank_00_000, …{hint}")
    return ranks


def _open(path: Path) -> Mapping[str, Any]:
    """The content of a rank's file."""
    state = pickled.load(path)
    if not isinstance(state, dict):
        raise ConfigError(f"{path} must hold a dictionary, as Megatron-LM writes it")
    if not isinstance(state.get("args"), argparse.Namespace):
        raise ConfigError(f"{path} must hold the arguments of the training under 'args': they are missing")
    return state


def _common_arguments(states: RankStates, folder: Path) -> tuple[dict[str, Any], int]:
    """The arguments and the checkpoint version, which must be the same in all files."""
    first = next(iter(states.values()))
    args = dict(vars(first["args"]))
    version = first.get("checkpoint_version", 0)
    if version not in _VERSIONS:
        raise ConfigError(f"the checkpoint_version of {folder} ({version!r}) must be {listing(_VERSIONS, 'or')}")
    problems: list[str] = []
    for name in (*SIZES, "tensor_model_parallel_size", "pipeline_model_parallel_size"):
        values = list(dict.fromkeys(vars(state["args"]).get(name) for state in states.values()))
        if len(values) > 1:
            problems.append(
                f"{folder}: {name} must be the same in all files, and some have {values[0]!r} and some {values[1]!r}"
            )
    for name in ("iteration", "checkpoint_version"):
        if any(state.get(name) != first.get(name) for state in states.values()):
            problems.append(f"{folder}: {name} must be the same in all files: some are of another checkpoint")
    if problems:
        raise ConfigError(problems)
    return args, int(version)


def _degrees(
    args: Mapping[str, Any], ranks: set[tuple[int, int]], folder: Path, rank_names: tuple[str, str]
) -> tuple[int, int]:
    """Tensor- and pipeline-parallel degree; every rank of them must have a file."""
    tensor = args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or max(t for t, _ in ranks) + 1
    pipeline = args.get("pipeline_model_parallel_size") or max(p for _, p in ranks) + 1
    if not is_count(tensor) or not is_count(pipeline) or tensor * pipeline > _MOST_RANKS:
        raise ConfigError(
            f"{folder}: TP {tensor!r} × PP {pipeline!r} must be whole numbers, at most {_MOST_RANKS:,} ranks"
        )
    require_ranks(str(folder), ranks, tensor, pipeline, rank_names[pipeline > 1].format)
    return tensor, pipeline


# ---- names


def _add_tensors(states: RankStates, shards: Shards, pipeline: int) -> None:
    """Add all tensors by the roles in `_NAMES_IN_LAYER` and `_NAMES_OUTSIDE`; layers are counted over all stages."""
    keys = _chunk_keys(states, shards.where)
    # Chunk v of all stages comes before chunk v + 1 of any: the layers are counted in this order.
    first = 0
    unknown: dict[str, None] = {}
    for key in keys:
        for stage in range(pipeline):
            tensors_by_rank = [_chunk(states[rank, stage][key], first, unknown) for rank in range(shards.ranks)]
            place = f"in {key} of stage {stage}" if pipeline * len(keys) > 1 else f"in {key}"
            shards.add(tensors_by_rank, place)
            first += _count_layers([name for tensors in tensors_by_rank for name in tensors], first)
    if unknown:
        names = listing(unknown, most=_SHOWN)
        shards.problems.append(f"{shards.where} has {names}, of which no GPT-2 or Llama has any")
    shards.require_floats()


def _is_legacy(states: RankStates) -> bool:
    """True if `megatron.legacy` wrote the files; their model keys have been checked."""
    state = states[0, 0]
    return "language_model" in state["model" if "model" in state else "model0"]


def _chunk_keys(states: RankStates, where: str) -> list[str]:
    """`model`, or `model0`, `model1`, … in order."""
    names = {key for state in states.values() for key in state if re.fullmatch(r"model\d*", key)}
    keys = ["model"] if names == {"model"} else [f"model{i}" for i in range(len(names))]
    if not names or any(set(keys) != names & set(state) for state in states.values()):
        raise ConfigError(f"{where} must hold 'model', or 'model0', 'model1', …, the same in every file")
    if any(not isinstance(state[key], dict) for state in states.values() for key in keys):
        raise ConfigError(f"{where} must hold the state of a model under {listing(keys)}")
    return keys


def _chunk(state: Mapping[str, Any], first: int, unknown: dict[str, None]) -> dict[str, Tensor]:
    """The tensors of a block of layers, which begins with the model's layer number `first`; adds names to `unknown`."""
    tensors: dict[str, Tensor] = {}
    for name, value in _flattened(state):
        if _NO_WEIGHTS.fullmatch(name):
            continue
        role_name = _role_name(name, first)
        if role_name is None or not isinstance(value, Tensor) or role_name in tensors:
            unknown[name] = None
        else:
            tensors[role_name] = value
    return tensors


def _count_layers(names: Iterable[str], first: int) -> int:
    """The number of layers in a block that begins with layer `first`."""
    numbers = [int(match[1]) for name in names if (match := _ROLE_LAYER.match(name))]
    return max(numbers) + 1 - first if numbers else 0


def _flattened(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries (of `megatron.legacy`) by dotted names, without the names of wrappers."""
    for key, value in state.items():
        name = prefix + str(key)
        if isinstance(value, dict):
            yield from _flattened(value, f"{name}.")
        else:
            yield re.sub(r"^((model|module)\.)*(language_model\.)?", "", name), value


def _role_name(name: str, first: int) -> str | None:
    """The name by layer and role, such as `layers.3.qkv.weight`; None for a tensor that has none."""
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
            return f"{prefix}{role}.{match[1]}"
    return None


# ---- the model


def _tensors(
    shards: Shards, config: GPTConfig | LlamaConfig, version: int, names: Iterable[str]
) -> Iterator[tuple[str, Stacked]]:
    """The canonical tensors of these names."""
    # Q, K and V, or gate and up, are asked for one by one and cut from one tensor.
    query_key_value = functools.cache(functools.partial(_query_key_value, shards, config, version))
    gate_up = functools.cache(functools.partial(shards.split, sizes=(config.intermediate_size // shards.ranks,) * 2))
    for name in names:
        path, _, kind = name.rpartition(".")
        layer = _HUGGING_FACE_LAYER.fullmatch(path)
        if layer is None:
            role, cut = _MODULES[path]
            source = f"{role}.{kind}"
        else:
            role, cut = _MODULES[layer[2]]
            source = f"layers.{layer[1]}.{role}.{kind}"
        if cut == "copies" or (cut == "rows" and kind == "bias"):
            tensor = shards.copies(source)
        elif cut == "rows":
            tensor = shards.rows(source)
        elif cut == "columns":
            tensor = shards.columns(source)
        elif cut == "tokens":
            tensor = shards.columns(source).rows(0, config.vocab_size)  # without the rows of padding
        elif cut in ("gate", "up"):
            gate, up = gate_up(source)
            tensor = gate if cut == "gate" else up
        else:  # Q, K and V: all of them, or a single one
            tensor = stack(query_key_value(source)["qkv".index(letter)] for letter in cut)
        # Hugging Face's GPT-2 has the matrices of its layers as [in, out].
        is_transposed = isinstance(config, GPTConfig) and layer and kind == "weight" and cut != "copies"
        yield name, (tensor.t if is_transposed else tensor)


def _query_key_value(shards: Shards, config: GPTConfig | LlamaConfig, version: int, name: str) -> list[Stacked]:
    """Q, K and V, each with the rows of all heads in order."""
    if shards.has(name.replace("qkv", "query")):
        return _separate_queries(shards, config, name)
    n = config.num_attention_heads
    g = config.num_key_value_heads
    d = config.head_dim
    ranks = shards.ranks
    fused = shards.columns(name)
    if not fused.parts:
        return [fused] * 3
    rows = (n + 2 * g) * d
    if fused.shape[0] != rows or (version < 2 and (g != n or n % ranks)):
        requirement = f"{rows} rows over {ranks} tensor-parallel ranks, of {n} query and {g} key/value heads"
        shards.misshapen(name, fused.shape, requirement)
        return [Stacked()] * 3
    if version == 0:
        return shards.split(name, [n * d // ranks] * 3)
    if version == 1:
        return [Stacked(tuple(part.unflatten(0, (-1, 3))[:, i] for part in fused.parts)) for i in range(3)]
    # Each group of rows has its queries, its key and its value.
    group_rows = rows // g
    query_stop = group_rows - 2 * d
    key_stop = group_rows - d
    parts_of_group = ((0, query_stop), (query_stop, key_stop), (key_stop, group_rows))
    return [
        stack(fused.rows(group * group_rows + start, group * group_rows + stop) for group in range(g))
        for start, stop in parts_of_group
    ]


def _separate_queries(shards: Shards, config: GPTConfig | LlamaConfig, name: str) -> list[Stacked]:
    """Q, K and V where the queries are a tensor of their own: K and V alternate head by head in another one."""
    g = config.num_key_value_heads
    d = config.head_dim
    key_value_name = name.replace("qkv", "key_value")
    key_value = shards.columns(key_value_name)
    if key_value.parts and key_value.shape[0] != 2 * g * d:
        requirement = f"{2 * g * d} rows over all tensor-parallel ranks, of {g} key/value heads"
        shards.misshapen(key_value_name, key_value.shape, requirement)
        key_value = Stacked()
    heads = [key_value.rows(head * d, (head + 1) * d) for head in range(2 * g)]
    return [shards.columns(name.replace("qkv", "query")), stack(heads[::2]), stack(heads[1::2])]


# ---- the arguments


_UNSET: tuple[Any, ...] = (None, False, 0, 0.0, (), [])
# Each of these, where it is set, makes a model that no family here covers; the value beside it changes nothing.
_MUST_BE_UNSET: dict[str, Any] = {
    "num_experts": None, "expert_model_parallel_size": 1, "multi_latent_attention": None, "mtp_num_layers": None,
    "qk_layernorm": None, "qk_l2_norm": None, "attention_output_gate": None, "window_size": None,
    "softmax_type": "vanilla", "softmax_scale": None, "experimental_attention_variant": None,
    "linear_attention_freq": None, "no_rope_freq": None, "rotary_interleaved": None,
    "rotary_seq_len_interpolation_factor": 1, "apply_layernorm_1p": None, "layernorm_zero_centered_gamma": None,
    "apply_residual_connection_post_layernorm": None, "squared_relu": None, "quick_geglu": None, "geglu": None,
    "activation_func_clamp_value": None, "glu_linear_offset": None, "add_qkv_bias": None, "use_mup": None,
    "hybrid_layer_pattern": None, "hybrid_override_pattern": None, "is_hybrid_model": None, "spec": None,
    "heterogeneous_layers_config_path": None, "heterogeneous_layers_config_encoded_json": None,
    "retro_add_retriever": None, "enable_mhc_connections": None,
}  # fmt: skip
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_DERIVED_SIZES = ("ffn_hidden_size", "kv_channels", "num_query_groups")
# The arguments by which Megatron-LM's models are told apart.
_KIND = ("position_embedding_type", "normalization", "swiglu")
_GPT = ("learned_absolute", "LayerNorm", False)
"""Values of `_KIND` in a GPT-2."""
_LLAMA = ("rope", "RMSNorm", True)
"""Values of `_KIND` in a Llama."""
_LARGEST = 10**9
# Megatron's own llama3 scaling has these numbers in its code (rotary_pos_embedding.py); only the factor is an argument.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_args(
    args: Mapping[str, Any], vocab_size: int, where: str, *, legacy: bool
) -> tuple[GPTConfig | LlamaConfig, list[str]]:
    """The model, and notes on arguments that have no counterpart.

    Args:
        args: the arguments.
        vocab_size: number of tokens without padding.
        where: subject of the messages.
        legacy: the model is one of `megatron.legacy`, which chooses its activation by other arguments.

    Raises:
        ConfigError: every argument that makes another model, and every one that is missing.
    """
    problems = [
        f"{where}: its argument {name} ({args[name]!r}) must be {'unset' if neutral is None else repr(neutral)}: it "
        "makes a model that no family here has"
        for name, neutral in _MUST_BE_UNSET.items()
        if name in args and args[name] not in _UNSET and args[name] != neutral
    ]
    problems += [f"{where}: its arguments must have {name}: it is missing" for name in SIZES if args.get(name) is None]
    problems += [
        f"{where}: its argument {name} ({args[name]!r}) must be a whole number from 1 on"
        for name in (*SIZES, *_DERIVED_SIZES)
        if args.get(name) is not None and not is_count(args[name])
    ]
    if problems:
        raise ConfigError(problems)
    section, notes = _section(args, vocab_size, where, legacy)
    config = validated(section, where)
    assert isinstance(config, GPTConfig | LlamaConfig)
    return config, notes


def _section(args: Mapping[str, Any], vocab_size: int, where: str, legacy: bool) -> tuple[dict[str, Any], list[str]]:
    """The configuration's `model` section, and notes on arguments that have no counterpart."""
    positions = args.get("position_embedding_type") or "learned_absolute"
    if args.get("use_rotary_position_embeddings"):
        positions = "rope"
    kind = (positions, args.get("normalization") or "LayerNorm", bool(args.get("swiglu")))
    hidden = args["hidden_size"]
    section = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": args.get("ffn_hidden_size") or 4 * hidden,
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": args["num_attention_heads"],
        "max_position_embeddings": args["max_position_embeddings"],
        "initializer_range": args.get("init_method_std") or 0.02,
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
    }
    if kind == _LLAMA:
        llama_section, notes = _llama_section(args, where)
        return section | llama_section, notes
    if kind == _GPT:
        return section | _gpt_section(args, where, legacy), []
    settings = listing(f"{name} ({value})" for name, value in zip(_KIND, kind, strict=True))
    raise ConfigError(
        f"{where}: its arguments {settings} must be {listing(_GPT)}, a GPT-2, or {listing(_LLAMA)}, a Llama: no other "
        "models are imported from Megatron-LM"
    )


def _llama_section(args: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The keys of a Llama that a GPT-2 lacks, and notes."""
    rotary = args.get("rotary_percent")
    _require(where, "Llama", ("rotary_percent", 1.0 if rotary is None else rotary, 1.0))
    is_biased = _is_biased(args)
    section: dict[str, Any] = {
        "family": "llama",
        "num_key_value_heads": _key_value_heads(args),
        "head_dim": _head_dim(args),
        "rms_norm_eps": _norm_epsilon(args),
        "rope_theta": float(args.get("rotary_base") or 10000),
        "attention_bias": is_biased,
        "mlp_bias": is_biased,
        "attention_dropout": args.get("attention_dropout", 0.0),
    }
    if args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor") or 8.0)
        section["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    dropout = args.get("hidden_dropout")
    notes = [f"hidden_dropout ({dropout}) is left out: a Llama has none"] if dropout else []
    return section, notes


def _gpt_section(args: Mapping[str, Any], where: str, legacy: bool) -> dict[str, Any]:
    """The keys of a GPT-2 that a Llama lacks."""
    heads = args["num_attention_heads"]
    groups = ("num_query_groups", _key_value_heads(args), heads)
    channels = ("kv_channels", _head_dim(args) * heads, args["hidden_size"])
    _require(where, "GPT-2", ("add_bias_linear", _is_biased(args), True), groups, channels)
    has_tanh = args.get("bias_gelu_fusion") or (legacy and args.get("openai_gelu"))
    hidden_dropout = args.get("hidden_dropout", 0.1)
    return {
        "family": "gpt",
        "layer_norm_epsilon": _norm_epsilon(args),
        "activation_function": "gelu_new" if has_tanh else "gelu",
        "embd_pdrop": hidden_dropout,
        "resid_pdrop": hidden_dropout,
        "attn_pdrop": args.get("attention_dropout", 0.1),
        "ffn_dropout": args.get("ffn_dropout", 0.0),
    }


def _key_value_heads(args: Mapping[str, Any]) -> int:
    heads: int = args["num_attention_heads"]
    if args.get("group_query_attention"):
        heads = args.get("num_query_groups") or heads
    return heads


def _head_dim(args: Mapping[str, Any]) -> int:
    head_dim: int = args.get("kv_channels") or args["hidden_size"] // args["num_attention_heads"]
    return head_dim


def _norm_epsilon(args: Mapping[str, Any]) -> float:
    epsilon: float = args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5
    return epsilon


def _is_biased(args: Mapping[str, Any]) -> bool:
    return bool(args.get("add_bias_linear", not args.get("disable_bias_linear", False)))


def _require(where: str, model: str, *requirements: tuple[str, object, object]) -> None:
    """Raise ConfigError where an argument (its name, its value, the value that the model needs) does not fit."""
    problems = [
        f"{where}: its argument {name} ({value!r}) must be {needed!r} for a {model}"
        for name, value, needed in requirements
        if value != needed
    ]
    if problems:
        raise ConfigError(problems)


def is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def choose_vocabulary(args: Mapping[str, Any], padded: int, vocab_size: int | None, where: str) -> int:
    """The number of tokens: the embedding has more rows, so that all ranks have equally many.

    Args:
        padded: rows of the embedding.
        vocab_size: number of tokens that the user gives, if any.
        where: subject of the messages.

    Raises:
        ConfigError: the size of the vocabulary is not known.
    """
    # NullTokenizer adds a token to the size that it is given.
    if vocab_size is None and args.get("tokenizer_type") != "NullTokenizer":
        vocab_size = args.get("vocab_size")
    if vocab_size is None or not is_count(vocab_size):
        raise ConfigError(
            f"{where} must say how many of the {padded:,} rows of its embedding are tokens and how many are padding: "
            f"its arguments do not, so give --vocab-size N or --tokenizer (--vocab-size {padded} keeps all rows)"
        )
    if vocab_size > padded:
        raise ConfigError(
            f"{where}: the vocabulary ({vocab_size:,}) must be at most the rows of its embedding ({padded:,}): give "
            "--vocab-size N"
        )
    return vocab_size
