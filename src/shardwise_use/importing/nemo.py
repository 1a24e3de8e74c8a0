"""Checkpoints of neuronx-nemo-megatron: GPT and Llama models, as NeMo and PyTorch Lightning save them.

    SOURCE/NAME.ckpt                              one rank
    SOURCE/mp_rank_TT/NAME.ckpt                   tensor-parallel rank TT
    SOURCE/tp_rank_TT_pp_rank_PPP/NAME.ckpt       and pipeline stage PPP
    ….ckpt.tensors/tensor_N.pt                    with save_xser: its tensors, to which the .ckpt refers by number
    …/optim/dp_rank_DDD/NAME-optimizer_states.ckpt     beside a .ckpt, with wrap_with_zero: see optimizer_shards.py

As collections/nlp/parts/nlp_overrides.py and serialization.py write them. NAME is such as
megatron_gpt--step=100-consumed_samples=3200.0, with -last at the end of both names for a last checkpoint. A file holds
the weights under "state_dict", the model's configuration under "hyper_parameters", the state of the rates under
"lr_schedulers" and, without wrap_with_zero, that of the optimizer under "optimizer_states". The weights are cut and
named almost as those of Megatron-LM, so each file is turned into one of Megatron-LM, and the configuration into its
arguments. The names and defaults of the configuration are those of
collections/nlp/models/language_modeling/megatron_gpt_model.py.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, listing
from shardwise_use.importing import megatron_arguments, pickled
from shardwise_use.importing.imported_model import ImportedModel
from shardwise_use.importing.megatron import combine_megatron_ranks
from shardwise_use.importing.megatron_model import NO_WEIGHTS
from shardwise_use.importing.optimizer_shards import ByName, Found, Rank, combine_with_optimizer
from shardwise_use.importing.tensor_parallel_shards import tensor_parallel_files
from shardwise_use.sparse_models import NEMO_ARGUMENTS

_SHOWN = 6

_RANK = re.compile(r"mp_rank_(\d{2,})|tp_rank_(\d{2,})(?:_pp_rank_(\d{3,}))?")
_RANK_NAMES = ("mp_rank_{:02d}", "tp_rank_{:02d}_pp_rank_{:03d}")
_SAMPLES = re.compile(r"consumed_samples=(\d+)")
# A list of names among the weights.
_BUFFERS = "untrained_buffer_names"
# A value of the configuration may be the name of another key, as OmegaConf writes it.
_REFERENCE = re.compile(r"\$\{(?:model)?\.(\w+)\}")

_SAME_NAMES = (
    *megatron_arguments.SIZES, "ffn_hidden_size", "kv_channels", "init_method_std", "hidden_dropout",
    "attention_dropout", "ffn_dropout", "layernorm_epsilon", "position_embedding_type",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip
"""Keys of the configuration that are Megatron-LM's arguments under the same name."""
_RENAMED = {
    "rotary_percentage": "rotary_percent", "num_kv_heads": "num_query_groups", "sliding_window_size": "window_size",
    **NEMO_ARGUMENTS,
}  # fmt: skip
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_ALLOWED_VALUES = {
    "activation": ("gelu", "swiglu"), "transformer_block_type": ("pre_ln",), "normalization": tuple(_NORMS),
    "positition_interpolation_factor": (1,),
}  # fmt: skip
"""Keys, misspelled as in NeMo → values that a model may have; the first one is the default."""


def open_nemo(
    source: Path, vocab_size: int | None = None, *, allow_drift: bool = False, weights_only: bool = False
) -> ImportedModel:
    """The model in a checkpoint of neuronx-nemo-megatron, with its progress where the state of AdamW is there.

    Args:
        source: the folder with the ranks' folders; FOLDER/NAME.ckpt, if they hold several checkpoints.
        vocab_size: number of tokens without padding, which no checkpoint tells.
    """
    folder, files = _files(source)
    saved = {rank: _opened(file) for rank, file in files.items()}

    def combine(where: str, tensors: ByName) -> ImportedModel:
        states = {rank: _as_megatron(str(files[rank]), saved[rank], found) for rank, found in tensors.items()}
        return combine_megatron_ranks(states, where, vocab_size, _RANK_NAMES, allow_drift=allow_drift)

    found = None if weights_only else _optimizers(files, saved)
    values = {rank: (file, _parameters(saved[rank])) for rank, file in files.items()}

    def told(_: int) -> dict[str, Any]:
        config, consumed = saved[min(saved)]["cfg"], _SAMPLES.search(files[min(files)].name)
        lengths = ((config.get("data") or {}).get("seq_length"), config.get("encoder_seq_length"))
        return saved[min(saved)] | {
            "given": (config.get("optim") or {}).get("sched") or {},
            "batch": config.get("global_batch_size"),
            "length": next((length for length in lengths if type(length) is int), None),
            "samples": int(consumed[1]) if consumed else None,
        }

    return combine_with_optimizer(str(folder), values, {}, found, combine, told)


def _files(source: Path) -> tuple[Path, dict[tuple[int, int], Path]]:
    """The folder, and (tensor-parallel rank, pipeline stage) → its file. A rank whose file is missing is left out."""
    is_file = source.suffix == ".ckpt"
    folder = source.parent if is_file else source
    ranks = tensor_parallel_files(folder, _RANK) or {(0, 0): folder}
    names = sorted({file.name for path in ranks.values() for file in path.glob("*.ckpt")})
    if not names:
        raise ConfigError(
            f"{folder} must hold folders tp_rank_00_pp_rank_000, … or mp_rank_00, … with a .ckpt in each, or one .ckpt"
        )
    if len(names) > 1 and not is_file:
        raise ConfigError(
            f"{folder} must hold one checkpoint, and it holds {listing(names, most=_SHOWN)}: name one, as "
            f"{folder / names[-1]}"
        )
    chosen = source.name if is_file else names[0]
    if chosen not in names:
        raise ConfigError(f"{source} must be a checkpoint in {folder}, which holds {listing(names, most=_SHOWN)}")
    return folder, {rank: path / chosen for rank, path in ranks.items() if (path / chosen).is_file()}


def _opened(path: Path) -> dict[str, Any]:
    saved = pickled.load_pickled(path)
    state = saved.get("state_dict") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise ConfigError(f"{path} must hold the weights of a model under 'state_dict', as PyTorch Lightning writes it")
    parameters = saved.get("hyper_parameters")
    config = parameters.get("cfg") if isinstance(parameters, dict) else None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold the model's configuration under 'hyper_parameters', 'cfg': it is missing")
    return {**saved, "cfg": config}


def _as_megatron(where: str, saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    # Version 3 cuts the fused Q, K and V by groups, as neuronx-nemo-megatron does.
    args = argparse.Namespace(**_arguments(saved["cfg"], where))
    return {"args": args, "checkpoint_version": 3, "iteration": saved.get("global_step"), "model": tensors}


def _parameters(saved: Mapping[str, Any]) -> dict[str, Any]:
    state = saved["state_dict"]
    buffers = [_BUFFERS, *(state.get(_BUFFERS) or ())]
    return {name: value for name, value in state.items() if name not in buffers and not NO_WEIGHTS.fullmatch(str(name))}


def _optimizers(files: Mapping[Rank, Path], saved: Mapping[Rank, Mapping[str, Any]]) -> Found:
    found: Found = {}
    for rank, file in files.items():
        name = re.sub(r"(-last)?\.ckpt$", r"-optimizer_states\g<0>", file.name)
        paths = {int(path.parent.name[-3:]): path for path in file.parent.glob(f"optim/dp_rank_[0-9][0-9][0-9]/{name}")}
        of_data_ranks = {data: pickled.load_pickled(path) for data, path in paths.items()}
        held = of_data_ranks or {0: saved[rank].get("optimizer_states")}
        for data, states in held.items():
            if isinstance(states, list) and states:
                found[*rank, data] = paths.get(data, file), states[0]
    return found


def _arguments(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    def value(name: str, default: Any = None) -> Any:
        setting = config.get(name)
        if isinstance(setting, str):
            reference = _REFERENCE.fullmatch(setting)
            if reference is not None:
                setting = config.get(reference[1])
        return default if setting is None else setting

    problems = [
        f"{where}: its {name} ({value(name)!r}) must be {listing(map(repr, allowed), 'or')}: no family here has another"
        for name, allowed in _ALLOWED_VALUES.items()
        if value(name, allowed[0]) not in allowed
    ]
    base = value("position_freq_base", 10000)
    factor = value("position_abf_factor", 1)
    if not isinstance(base, int | float) or not isinstance(factor, int | float):
        problems.append(
            f"{where}: its position_freq_base ({base!r}) and position_abf_factor ({factor!r}) must be numbers"
        )
    if problems:
        raise ConfigError(problems)
    settings = {name: value(name) for name in _SAME_NAMES}
    settings |= {argument: value(name) for name, argument in _RENAMED.items()}
    window = settings["window_size"]
    return {name: setting for name, setting in settings.items() if setting is not None} | {
        "normalization": _NORMS[value("normalization", "layernorm")],
        "swiglu": value("activation") == "swiglu",
        "bias_gelu_fusion": value("bias_activation_fusion", True),
        "add_bias_linear": value("has_bias", True),
        "untie_embeddings_and_output_weights": not value("share_embeddings_and_output_weights", True),
        "group_query_attention": value("num_kv_heads") is not None,
        "rotary_base": base * factor,
        # A window as wide as the model's longest sequence is none.
        "window_size": None if window == settings["max_position_embeddings"] else window,
    }
