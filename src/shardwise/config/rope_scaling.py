"""Fields of each type of rotary-embedding scaling (`model.rope_scaling`, as Hugging Face writes it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from shardwise.base.errors import listing, nearest_name
from shardwise.config.base_section import LARGEST

LENGTH = "original_max_position_embeddings"
"""The field for the longest sequence before the scaling."""
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", LENGTH, "truncate"),
    "longrope": ("attention_factor", "factor"),
}
_FIELDS = {rope_type: (*names, *_OPTIONAL.get(rope_type, ())) for rope_type, names in _REQUIRED.items()}
_NAMES = {name for names in _FIELDS.values() for name in names} | {"finetuned"}
"""Fields of all types. `finetuned` says that the weights were trained with the scaling: it decides nothing."""


def scaling_with_one_type(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `rope_scaling` mapping without the old name `type`, which counts if `rope_type` is null."""
    fields = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
    for key in ("rope_type", "type"):
        if scaling.get(key) is not None:
            return {"rope_type": scaling[key], **fields}
    return fields


def unknown_scaling_fields(scaling: Mapping[str, Any]) -> list[str]:
    """Return the fields of a `rope_scaling` mapping of a known type that no type has."""
    if str(scaling_with_one_type(scaling).get("rope_type", "default")) not in _REQUIRED:
        return []
    return [key for key in scaling if key not in _NAMES and key not in ("rope_type", "type")]


def effective_scaling(scaling: Mapping[str, Any], longest: int) -> dict[str, Any] | None:
    """Return the fields of a `rope_scaling` mapping that decide the angles; None if nothing is scaled.

    Fields of other types are left out: transformers does not read them. The length before the scaling is filled in,
    from `longest`, the model's `max_position_embeddings`. Types and fields that transformers lacks too are kept.
    """
    rope_type = scaling["rope_type"]
    if not isinstance(rope_type, str) or rope_type not in _FIELDS:
        return dict(scaling)  # `rope_scaling_problems` refuses it
    # Only fields of other types go: one that no type has may be a misspelt one, and must be refused.
    ignored = _NAMES.difference(_FIELDS[rope_type])
    effective = {key: value for key, value in scaling.items() if value is not None and key not in ignored}
    if LENGTH in _FIELDS[rope_type]:
        return {**effective, LENGTH: effective.get(LENGTH, longest)}
    if effective == {"rope_type": "default"}:
        return None
    return effective


def rope_scaling_problems(scaling: Mapping[str, Any], rotary_dim: int) -> list[str]:
    """Return an error for each rule that a `model.rope_scaling` breaks."""
    rope_type = scaling.get("rope_type")
    valid = f"one of {listing(_REQUIRED, 'or')}"
    if rope_type is None:
        return [f"model.rope_scaling.rope_type is missing: {valid}"]
    if not isinstance(rope_type, str) or rope_type not in _REQUIRED:
        return [f"model.rope_scaling.rope_type ({rope_type!r}) must be {valid}"]
    allowed = ("rope_type", *_FIELDS[rope_type])
    problems = [
        f"model.rope_scaling.{key} is missing: rope_type {rope_type} needs it"
        for key in _REQUIRED[rope_type]
        if scaling.get(key) is None
    ]
    for key, value in scaling.items():
        if key not in (*allowed, LENGTH):  # types that have no use for the length ignore it, as transformers does
            near = nearest_name(str(key), allowed)
            hint = f"did you mean {near}?" if near else f"rope_type {rope_type} takes {listing(allowed)}"
            problems.append(f"model.rope_scaling.{key}: unknown key; {hint}")
        elif key != "rope_type" and value is not None:
            problems += _value_problems(key, value, rotary_dim)
    if not problems and rope_type == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        problems.append(
            f"model.rope_scaling.high_freq_factor ({scaling['high_freq_factor']}) must be greater than "
            f"model.rope_scaling.low_freq_factor ({scaling['low_freq_factor']})"
        )
    if not problems and rope_type == "yarn":
        # transformers' defaults, also for 0 and null.
        fast = scaling.get("beta_fast") or 32
        slow = scaling.get("beta_slow") or 1
        if fast < slow:
            problems.append(
                f"model.rope_scaling.beta_fast ({fast}) must be at least model.rope_scaling.beta_slow ({slow})"
            )
    return problems


def _value_problems(key: str, value: object, rotary_dim: int) -> list[str]:
    shown = repr(value)
    # Comparisons so that a NaN, which YAML and JSON can hold, is refused too.
    if key in ("short_factor", "long_factor"):
        is_valid = isinstance(value, list) and all(map(_is_number, value)) and len(value) == rotary_dim // 2
        shown = f"length {len(value)}" if isinstance(value, list) else shown
        must = f"be a list of one number per rotary frequency, half of the rotary width ({rotary_dim // 2})"
    elif key == "truncate":
        is_valid = isinstance(value, bool)
        must = "be true or false"
    elif key == LENGTH:
        is_valid = _is_number(value) and isinstance(value, int) and 0 < value <= LARGEST
        must = f"be a whole number from 1 to {LARGEST}"
    elif key == "factor":
        is_valid = _is_number(value) and 1 <= value <= LARGEST
        must = f"be a number of at least 1 and at most {LARGEST}"
    else:
        is_valid = _is_number(value) and 0 < value <= LARGEST
        must = f"be a number greater than 0 and at most {LARGEST}"
    return [] if is_valid else [f"model.rope_scaling.{key} ({shown}) must {must}"]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
