"""Hugging Face's `config.json` and our `model` section, in both directions.

A field is translated, or has the one value that we support (`formats.ONLY`), or changes nothing that is trained
(`formats.status`), or the user says so (`model.ignore`); every other field is an error. An absent field has Hugging
Face's default.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, listing
from shardwise.base.files import read_plain
from shardwise.base.parsing import json_value, scalar
from shardwise.config.decoders import DecoderConfig, every_nth_without_rope
from shardwise.config.families import GPTConfig, GPTNeoXConfig
from shardwise.config.hugging_face_fields import FORMATS, ONLY, Format, status
from shardwise.config.model import FamilyConfig
from shardwise.config.rope_scaling import LENGTH, effective_scaling, unknown_fields, with_one_type

_DERIVED = ("num_key_value_heads", "head_dim")
"""Fields that follow from others where they are null, even if the family's default is a number."""
_SAME_ACTIVATION = {"swish": "silu", "gelu_python": "gelu"}
_FULL = "full_attention"
_MOVED = ("rope_theta", "partial_rotary_factor")
"""Fields of `rope_parameters` that are keys by themselves here."""


class UnsupportedError(ConfigError):
    """Fields of a `config.json` that describe a model which shardwise lacks.

    Attributes:
        section: the `model` section of the file, with defaults in their place.
    """

    def __init__(self, problems: Sequence[str], section: dict[str, Any]) -> None:
        super().__init__(problems)
        self.section = section


def read_hugging_face(path: Path, ignore: Collection[str] = ()) -> dict[str, Any]:
    """The `model` section that a `config.json`, or the folder that holds one, describes.

    Args:
        path: the file or the folder.
        ignore: as in `from_hugging_face`.

    Raises:
        ConfigError: the file is missing or no JSON object; else as `from_hugging_face`.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        return parse_hugging_face(read_plain(file), str(file), ignore)
    except FileNotFoundError:
        if path.is_dir():
            raise ConfigError(f"the folder {path} holds no config.json") from None
        raise ConfigError(f"there is no file or folder {path}: give a Hugging Face config.json or its folder") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def parse_hugging_face(text: bytes, origin: str, ignore: Collection[str] = ()) -> dict[str, Any]:
    """The `model` section that the text of a `config.json` describes; `origin` and `ignore` as in `from_hugging_face`.

    Raises:
        ConfigError: the text is no JSON object; else as `from_hugging_face`.
    """
    try:
        values = json_value(text.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except ValueError as error:
        raise ConfigError(f"{origin} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{origin} must hold a JSON object, as a Hugging Face config.json does")
    return from_hugging_face(values, origin, ignore)


def from_hugging_face(values: Mapping[str, Any], origin: str, ignore: Collection[str] = ()) -> dict[str, Any]:
    """The `model` section that the fields of a Hugging Face configuration describe.

    Old and new spellings are read: GPT-2's `n_embd`, `rotary_pct` and `rotary_emb_base`, `rope_theta` and
    `rope_scaling` or the `rope_parameters` of transformers 5. Pydantic checks the section's own values later.

    Args:
        values: the fields.
        origin: names the fields in errors.
        ignore: names of fields that change nothing, as the user says (`model.ignore`).

    Raises:
        UnsupportedError: with every field that describes a model which shardwise lacks, and what is supported.
        ConfigError: the model is of none of our families.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        shown = "is missing: it" if kind is None else f"({_shown(kind)})"
        raise ConfigError(f"{origin}: model_type {shown} must be {listing(FORMATS, 'or')}")
    form = FORMATS[kind]
    given, problems = _one_spelling(values, form)
    problems += _layers(given, form)
    if given.get("use_sliding_window") is False and "sliding_window" not in form.absent:
        given.pop("sliding_window", None)  # the width of a window that is not used
    section: dict[str, Any] = {"family": form.family}
    if ignore:
        section["ignore"] = list(ignore)
    for key, (name, default) in form.fields.items():
        value = given.pop(name, default)
        if value is None and name not in (*_DERIVED, "pad_token_id"):
            value = default
        problem = None
        if key == form.model.keys["activation"]:
            value = _SAME_ACTIVATION.get(str(value), value)
            if value not in form.activations:
                problem = _unsupported(name, value, form.activations)
        elif name in form.only and value != form.only[name]:
            problem = _unsupported(name, value, (form.only[name],))
        elif value is None and default is not None and name not in _DERIVED:
            problem = f"{name} (null) is not supported: only an id"
        if problem is not None:
            problems.append(problem)
            value = default
        if value is not None:
            section[key] = value
    if "rope_theta" in form.model.model_fields:
        rotary, rotary_problems = _rotary(given, section["max_position_embeddings"], form, ignore)
        section |= rotary
        problems += rotary_problems
    problems += _leftover(given, form, ignore) + _not_ignorable(values, form, ignore)
    if problems:
        raise UnsupportedError([f"{origin}: {problem}" for problem in problems], section)
    return section


def to_hugging_face(model: FamilyConfig) -> dict[str, Any]:
    """The fields of a model's `config.json`, as transformers 4 and 5 read them, without dtype and token ids."""
    kind, form = next((kind, form) for kind, form in FORMATS.items() if form.family == model.family)
    fields: dict[str, Any] = {"architectures": [form.architecture], "model_type": kind}
    fields |= {name: getattr(model, key) for key, (name, _) in form.fields.items()}
    fields |= dict.fromkeys(form.absent)
    if not model.ffn_dropout_p:
        fields.pop("ffn_dropout", None)  # only shardwise reads this field
    if isinstance(model, GPTConfig) and model.intermediate_size == 4 * model.hidden_size:
        fields["n_inner"] = None
    if not form.writes_derived_heads and model.head_dim * model.num_attention_heads == model.hidden_size:
        del fields["head_dim"]
    if isinstance(model, DecoderConfig | GPTNeoXConfig):
        scaling = dict(model.rope_scaling or {"rope_type": "default"})
        fields["rope_parameters"] = {"rope_theta": model.rope_theta, **scaling}
        fields["rope_scaling"] = model.rope_scaling
        if isinstance(model, GPTNeoXConfig):
            fields["rope_parameters"]["partial_rotary_factor"] = model.rotary_pct
            fields |= {"rotary_pct": model.rotary_pct, "rotary_emb_base": model.rope_theta}
        else:
            fields["rope_theta"] = model.rope_theta
    return fields


def _layers(given: dict[str, Any], form: Format) -> list[str]:
    """Take `layer_types` and `no_rope_layer_interval` out of `given`; returns what is wrong with them.

    Every family attends fully in all layers, so `layer_types` may say nothing else. From the interval, `no_rope_layers`
    is made where the file lacks it.
    """
    name, default = form.fields["num_hidden_layers"]
    layers = given.get(name, default)
    layers = layers if isinstance(layers, int) else default  # pydantic refuses another type later
    problems, types = [], given.pop("layer_types", None)
    if types and types != [_FULL] * layers:
        problems.append(f'layer_types ({_shown(types)}) is not supported: only "{_FULL}" for each of {layers} layers')
    if "no_rope_layers" in form.fields:
        interval = given.pop("no_rope_layer_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            problems.append(f"no_rope_layer_interval ({_shown(interval)}) must be a positive whole number")
        elif given.get("no_rope_layers") is None:
            given["no_rope_layers"] = every_nth_without_rope(interval, layers)
    return problems


def _one_spelling(values: Mapping[str, Any], form: Format) -> tuple[dict[str, Any], list[str]]:
    """The fields under the names that `form` has for them; and an error for each two spellings that differ."""
    given, problems = dict(values), []
    for spelling, name in form.spellings.items():
        if spelling not in given:
            continue
        value = given.pop(spelling)
        if given.setdefault(name, value) != value:
            problems.append(f"{spelling} ({_shown(value)}) and {name} ({_shown(given[name])}) must be equal")
    return given, problems


def _rotary(
    given: dict[str, Any], longest: int, form: Format, ignore: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Take the fields of rotary embeddings out of `given`; returns our keys for them, and what contradicts them.

    Fields of the mappings that no type of scaling has come into `given`, unless `ignore` names them.

    As in transformers 5, `rope_scaling` counts before `rope_parameters`, and both before the fields beside them.
    """
    keys = form.model.model_fields
    partial = "rotary_pct" in keys
    scalings = {name: given.pop(name, None) or {} for name in ("rope_scaling", "rope_parameters")}
    problems = [
        f"{name} ({_shown(value)}) must be an object" for name, value in scalings.items() if not isinstance(value, dict)
    ]
    scalings = {name: value if isinstance(value, dict) else {} for name, value in scalings.items()}
    for name, value in scalings.items():
        unknown = [key for key in unknown_fields(value) if key not in _MOVED]
        given |= {f"{name}.{key}": value[key] for key in unknown if key not in ignore}
        scalings[name] = {key: inner for key, inner in value.items() if key not in unknown}
    # A length beside the mappings counts before one in them, where their type needs it.
    length = {key: given.pop(key) for key in (LENGTH,) if given.get(key) is not None}
    old, new = ({**value, **length} if value else {} for value in scalings.values())
    theta_field, part_field = ("rotary_emb_base", "rotary_pct") if partial else ("rope_theta", "partial_rotary_factor")
    chosen = old or new
    theta = _first(chosen.get("rope_theta"), given.get(theta_field), keys["rope_theta"].default)
    part = _first(
        chosen.get("partial_rotary_factor"), given.get(part_field), keys["rotary_pct"].default if partial else 1.0
    )
    scaling = _scaling(chosen, longest)
    if old and new and scaling != _scaling(new, longest):
        problems.append(f"rope_scaling ({_shown(old)}) and rope_parameters ({_shown(new)}) must say the same")
    for name, effective, source in (
        ("rope_theta", theta, theta_field),
        ("rotary_emb_base", theta, theta_field),
        ("partial_rotary_factor", part, part_field),
        ("rotary_pct", part, part_field),
    ):
        for place, value in ((name, given.pop(name, None)), (f"rope_parameters.{name}", new.get(name))):
            if value is not None and value != effective:
                problems.append(
                    f"{place} ({_shown(value)}) must be {_shown(effective)}, which Hugging Face reads from "
                    f"rope_scaling, rope_parameters or {source}"
                )
    section: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if partial:
        section["rotary_pct"] = part
    elif part != 1.0:
        problems.append(_unsupported("partial_rotary_factor", part, (1.0,)))
    return section, problems


def _scaling(parameters: Mapping[str, Any], longest: int) -> dict[str, Any] | None:
    """Our `rope_scaling` of Hugging Face's: what decides the angles, without what is a key by itself here."""
    scaling = with_one_type(
        {key: value for key, value in parameters.items() if key not in _MOVED and value is not None}
    )
    return effective_scaling({"rope_type": "default", **scaling}, longest)


def _leftover(given: Mapping[str, Any], form: Format, ignore: Collection[str]) -> list[str]:
    """An error for each field that is not translated and has another value than the one that changes nothing.

    The fields that no family knows are one error, with the key that leaves them out.
    """
    only = {**ONLY, **form.only}
    problems = [
        f"{name} is missing, which means {_shown(value)}: only {_shown(only[name])} is supported"
        for name, value in form.absent.items()
        if name not in given and name in only
    ]
    unknown = []
    for name, value in given.items():
        kind = status(name, value, form)
        if kind == "unsupported":
            problems.append(_unsupported(name, value, (only[name],)))
        elif kind == "unknown" and name not in ignore:
            unknown.append(name)
    if unknown:
        shown = listing(f"{name} ({_shown(given[name])})" for name in unknown)
        are, they = ("is no field", "it changes") if len(unknown) == 1 else ("are no fields", "they change")
        problems.append(
            f"{shown} {are} that shardwise knows: if {they} nothing that the model computes, set "
            f"{_override([*ignore, *unknown])}"
        )
    return problems


def _not_ignorable(values: Mapping[str, Any], form: Format, ignore: Collection[str]) -> list[str]:
    """An error for the fields of the file that `model.ignore` names although they change what a model computes."""
    names = [name for name in ignore if name in values and status(name, values[name], form) == "unsupported"]
    if not names:
        return []
    change = "changes" if len(names) == 1 else "change"
    return [f"model.ignore must not name {listing(names)}, which {change} what a model computes"]


def _override(names: Iterable[str]) -> str:
    """`model.ignore` as one word of a command line; names that YAML would read as other values stand in quotes."""
    shown = [
        name if re.fullmatch(r"[A-Za-z_][\w.-]*", name) and scalar(name) == name else json.dumps(name) for name in names
    ]
    override = f"model.ignore=[{','.join(shown)}]"
    return shlex.quote(override) if '"' in override else override


def _unsupported(name: str, value: Any, valid: Iterable[Any]) -> str:
    return f"{name} ({_shown(value)}) is not supported: only {listing(map(_shown, valid), 'or')}"


def _shown(value: Any) -> str:
    """As JSON, cut short where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
