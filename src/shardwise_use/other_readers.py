"""The programs that open a model of shardwise, and what each of them computes: the record `readers.json`.

The record is made by running the programs (`tests/interop/readers`). It has a line for each family with its default
values, and one for each key at another value. A model is described by the same lines, `model_lines`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, listing, nearest_name, see
from shardwise.config import FamilyConfig
from shardwise.config.sparse import SPARSE_SIZES

GGUF = "gguf"
TOLERANCE = 0.005
"""Largest difference of a log-probability that is rounding: llama.cpp has GELU as a table in float16 (0.002)."""
PLAIN = "defaults"
"""The line of a family at its default values."""
_SIZES = (
    "family", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "initializer_range", "ignore", "pad_token_id", "type_vocab_size",
    "head_dim", *SPARSE_SIZES,
)  # fmt: skip
"""Keys without which no model can be described, at any value."""
_PUBLISHED = {"qwen3_moe": {"norm_topk_prob": True}}
"""Values that all published models of a family have, where its default is another: they count as its default values."""


def model_lines(model: FamilyConfig) -> dict[str, Any]:
    """The lines of the record of readers that describe a model, beside `PLAIN`: key, or key=word → its value."""
    values = vars(model)
    lines: dict[str, Any] = {}
    for key, info in type(model).model_fields.items():
        value = values[key]
        default = info.get_default(call_default_factory=True, validated_data=values)
        default = _PUBLISHED.get(model.family, {}).get(key, default)
        if key in _SIZES or key.endswith(("_dropout", "_pdrop", "_dropout_prob")):
            continue
        if key == "sliding_window" and (default is not None or (value or 0) >= model.max_position_embeddings):
            continue  # a width, or no limit
        if key == "query_pre_attn_scalar":
            default = model.head_dim
        if value != default:
            word = value["rope_type"] if isinstance(value, dict) else value
            lines[f"{key}={word}" if isinstance(word, str) else key] = value
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        lines["head_dim"] = model.head_dim
    if not model.gated and model.intermediate_size != 4 * model.hidden_size:
        lines["intermediate_size"] = model.intermediate_size
    return lines


@cache
def reader_record() -> dict[str, Any]:
    """Programs that read models: `readers` (name → title), `lines` (family → line → name → result).

    A result has `by`, the largest difference of a log-probability, or `says`, what the program refuses the model with.
    """
    recorded: dict[str, Any] = json.loads(Path(__file__).with_name("readers.json").read_text(encoding="utf-8"))
    return recorded


def is_computed_right(result: Mapping[str, Any] | None) -> bool:
    """True if another program computes what the model computes, up to its rounding."""
    return result is not None and result.get("by", math.inf) <= TOLERANCE


def require_readable(model: FamilyConfig, reader: str) -> tuple[str, ...]:
    """Sentences on what was not tried of a model in another program; ConfigError: it computes something else."""
    readers = reader_record()["readers"]
    if reader not in readers:
        near = nearest_name(reader, readers)
        hint = f"did you mean {near}?" if near else f"valid are {listing(readers)}"
        raise ConfigError(f"--for ({reader}) must be a program that models were tried with: {hint}")
    of_family: Mapping[str, Any] = reader_record()["lines"].get(model.family, {})
    lines = {PLAIN: None, **model_lines(model)}
    title = f"{readers[reader]['title']} {readers[reader]['version']}"
    results = {line: of_family.get(line, {}).get(reader) for line in lines}
    wrong = {line: result for line, result in results.items() if result is not None and not is_computed_right(result)}
    if not wrong:
        untried = [_shown(line, lines[line]) for line, result in results.items() if result is None]
        return tuple(f"{title} was not tried with family {model.family} and {shown}" for shown in untried)
    # What a program makes of the family itself explains the other lines.
    told = {PLAIN: wrong[PLAIN]} if PLAIN in wrong else wrong
    reasons = [_told(result, f"{model.family} with {_shown(line, lines[line])}") for line, result in told.items()]
    working = [name for name in readers if all(is_computed_right(of_family.get(line, {}).get(name)) for line in lines)]
    advice = f"right with it: {listing(working)}" if working else "no program that was tried is right with it"
    raise ConfigError(
        f"{title} must compute what the model does, and {listing(reasons)}; {advice}{see('checkpoints#read-otherwise')}"
    )


def _told(result: Mapping[str, Any], model: str) -> str:
    if "says" in result:
        return f"refuses {model} ({result['says']})"
    return f"its log-probabilities of {model} are off by {result['by']:.2g}"


def _shown(line: str, value: Any) -> str:
    return "default values" if line == PLAIN else f"model.{line.partition('=')[0]} ({json.dumps(value)})"
