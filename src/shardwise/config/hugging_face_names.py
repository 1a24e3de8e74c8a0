"""Tables of names in Hugging Face's files: the fields of a `config.json`, and the weights.

- `ConfigFile`, one for each family: names, defaults and spellings of the fields that are keys of its `model` section.
- `_OtherFields`: the fields of any family that are no keys, by what they mean.
- `WeightNames`, one for each family: other names under which files hold its weights.

`config/hugging_face.py` reads and writes `config.json` by these tables; `checkpoint/` reads and writes the weights.

The canonical names of weights are those that `transformers` writes today. Older files, files of a model without its
head, and files that hold buffers or a tied weight twice are read through a family's `WeightNames`; nothing else is
guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shardwise.base.yaml_and_json import read_mapping

ROUTER_BIAS = ".e_score_correction_bias"
WITHOUT_GRADIENT = (ROUTER_BIAS,)
"""Ends of names of weights that a rule moves in small steps, for which files of any dtype have them in float32."""


@dataclass(frozen=True)
class ExpertNames:
    """The names that a Hugging Face family has for the parts of a block with experts."""

    layer: str = "mlp"
    router: str = "gate"
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ConfigFile:
    """The way in which one family's `config.json` is written.

    A field has the name and the default of the family's key, where `names` and `defaults` do not say otherwise.

    Attributes:
        model_type: value of the field `model_type`, which names the family in a file.
        defaults: key → Hugging Face's default, where the family's class has none or another one.
        names: key → Hugging Face's field, where they differ.
        spellings: another spelling that Hugging Face reads → field.
        only: field → its one supported value, beside `_OtherFields.only`; these count before `inert` and `is_inert`.
        absent: field → the value that its absence means to transformers; written files say null there.
        inert: fields that change nothing that is trained in this family, whatever `_OtherFields.only` says.
        rotary_fields: names of the base and of the rotary fraction of a head outside of mappings.
        has_window_switch: true if `sliding_window` counts only beside `use_sliding_window` (true).
        layer_interval: field with the interval of blocks without a window, if the file has no `layer_types`.
        max_window_layers: default of this field: blocks before the first with a window, if the file has no
            `layer_types`.
        window_rotary_key: key with the base of the rotary frequencies of blocks with a window, if files have angles
            for each type of layer.
        writes_derived_heads: true if a file states `head_dim` where it follows from other fields; `scaled`: only beside
            a `rope_scaling`, for which transformers reads a null of this class as no width.
        null_if_derived: keys that a file states as null where they follow from others.
        twice: field → a second name under which files state it too, for programs that read that name alone.
        written: further fields of written files, with their values.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    rotary_fields: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    has_window_switch: bool = False
    layer_interval: str | None = None
    max_window_layers: int | None = None
    window_rotary_key: str | None = None
    writes_derived_heads: bool | Literal["scaled"] = True
    null_if_derived: tuple[str, ...] = ()
    twice: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)


class _OtherFields:
    """The fields of any family that are no keys, as `hugging_face_fields.yaml` records them.

    Attributes:
        lacking: value of `model_type` that is near to a family → what shardwise lacks for it.
        only: field that changes what a model computes → the one value at which it changes nothing.
        absent_if_empty: fields that count as absent where they are 0, false or empty.
    """

    def __init__(self) -> None:
        record = read_mapping(Path(__file__).with_name("hugging_face_fields.yaml"))
        self.lacking: dict[str, str] = record["lacking"]
        self.only: dict[str, Any] = record["only"]
        self.absent_if_empty = frozenset[str](record["absent_if_empty"])
        self._inert = frozenset[str](name for names in record["inert"] for name in names)

    def is_inert(self, name: str) -> bool:
        """Return whether a field changes nothing that is trained, in a file of any family.

        The name of a program's own note begins with `_`, and ids of special tokens, which only a tokenizer and text
        generation read, end in `_token_id`.
        """
        return name in self._inert or name.startswith("_") or name.endswith(("_token_id", "_token_ids"))


@cache
def other_config_fields() -> _OtherFields:
    """Return the record of other fields of Hugging Face's `config.json`, read with the first such file."""
    return _OtherFields()


@dataclass(frozen=True)
class WeightNames:
    """The Hugging Face names of a family's weights beside the canonical ones.

    Attributes:
        base: prefix that a file lacks if it was written from the model without its head.
        heads: prefixes of names outside of `base`, which such a file may still have.
        renamed: pairs of a pattern of another spelling and its replacement.
        buffers: pattern of names that hold no weight, but a mask or a table that the model computes.
        further_block: pattern of a weight that a block behind the model's own has, which predicts later tokens; the
            first group is the prefix of the block's names.
        tied: second name of a weight that the model has once → its canonical name.
    """

    base: str = ""
    heads: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    buffers: str = r"(?!)"  # matches no name
    further_block: str = r"(?!)()"
    tied: dict[str, str] = field(default_factory=dict)

    def canonical(self, stored: Collection[str], canonical_names: Collection[str]) -> dict[str, str]:
        """Map the names in a file to the model's canonical names; buffers and further blocks are left out.

        A name that stands for none of `canonical_names` is mapped to itself.
        """
        lacks_base = bool(self.base) and not any(name.startswith(self.base) for name in stored)
        prefixes = {match[1] for name in stored if (match := re.fullmatch(self.further_block, name))}
        further = tuple(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in canonical_names))
        names = {}
        for name in stored:
            if name.startswith(further):
                continue
            full_name = name
            if lacks_base and not name.startswith(self.heads):
                full_name = self.base + name
            for pattern, replacement in self.renamed:
                full_name = re.sub(pattern, replacement, full_name)
            if re.fullmatch(self.buffers, full_name):
                continue
            if full_name not in canonical_names and self.tied.get(full_name) in canonical_names:
                full_name = self.tied[full_name]
            names[name] = full_name if full_name in canonical_names else name
        return names
