"""Translates Hugging Face's `config.json` into a `model` section (`from_hugging_face`), and back (`to_hugging_face`).

The tables of names that this needs, and those of weights, are in `config/hugging_face_names.py`; here is what is done
with a file. A field is translated, or has the one value that we support (`only` there), or changes nothing that is
trained (`_field_status`), or the user says so (`model.ignore`); every other field is an error. An absent field has
Hugging Face's default.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from shardwise.base.errors import ConfigError, listing
from shardwise.base.files import read_plain
from shardwise.base.yaml_and_json import json_value, yaml_scalar
from shardwise.config.decoders import every_nth_full, every_nth_without_rope
from shardwise.config.families import FamilyConfig
from shardwise.config.hugging_face_names import other_config_fields
from shardwise.config.model import FAMILIES
from shardwise.config.rope_scaling import LENGTH, effective_scaling, scaling_with_one_type, unknown_scaling_fields

_ROTARY_KEYS = ("rope_theta", "rope_scaling", "rotary_pct")
_ONLY_IN_RECIPES = ("family", "ignore")  # keys of a `model` section that no `config.json` has
_DERIVED = ("num_key_value_heads", "head_dim")
"""Fields that follow from others where they are null, even if the family's default is a number."""
_WINDOW = "sliding_window"  # the field whose null means none, even if the family's default is a number
_SAME_ACTIVATION = {"swish": "silu", "gelu_python": "gelu"}
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_MOVED = ("rope_theta", "partial_rotary_factor")
"""Fields of `rope_parameters` that are keys of their own in a `model` section."""


class UnsupportedError(ConfigError):
    """Fields of a `config.json` that shardwise lacks; `section`: its `model` section, with defaults in their place."""

    def __init__(self, problems: Sequence[str], section: dict[str, Any]) -> None:
        super().__init__(problems)
        self.section = section


def read_hugging_face(path: Path, ignore: Collection[str] = ()) -> dict[str, Any]:
    """Return the `model` section that a `config.json`, or the folder that holds one, describes.

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
    """Return the `model` section that the text of a `config.json` describes; arguments as in `from_hugging_face`.

    Raises:
        ConfigError: the text is no JSON object; else as `from_hugging_face`.
    """
    try:
        values = json_value(text.decode())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except ValueError as error:
        raise ConfigError(f"{origin} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{origin} must hold a JSON object, as a Hugging Face config.json does")
    return from_hugging_face(values, origin, ignore)


def from_hugging_face(values: Mapping[str, Any], origin: str, ignore: Collection[str] = ()) -> dict[str, Any]:
    """Return the `model` section that the fields of a Hugging Face configuration describe.

    Old and new spellings are read: GPT-2's `n_embd`, `rotary_pct` and `rotary_emb_base`, `rope_theta` and
    `rope_scaling` or the `rope_parameters` of transformers 5. Pydantic checks the section's own values later.

    Args:
        origin: names the fields in errors.
        ignore: names of fields that change nothing, as the user says (`model.ignore`).

    Raises:
        UnsupportedError: a field describes a model which shardwise lacks; names all such fields and what is supported.
        ConfigError: the model is of none of our families.
    """
    model_type = values.get("model_type")
    families = _families_by_model_type()
    if not isinstance(model_type, str) or model_type not in families:
        if lacking := other_config_fields().lacking.get(str(model_type)):
            raise ConfigError(f"{origin}: model_type ({_shown(model_type)}) is not supported: {lacking}")
        shown = "is missing: it" if model_type is None else f"({_shown(model_type)})"
        raise ConfigError(f"{origin}: model_type {shown} must be {listing(families, 'or')}")
    family = families[model_type]
    unread, problems = _one_spelling(values, family)
    if family.config_file.has_window_switch and unread.pop("use_sliding_window", False) is not True:
        unread[_WINDOW] = None  # the width of a window that is not used
    elif unread.get("use_sliding_window") is False and _WINDOW not in family.model_fields:
        unread.pop(_WINDOW, None)
    problems += _take_layers(unread, family) + _take_window_rotary(unread, family)
    section: dict[str, Any] = {"family": next(name for name, known in FAMILIES.items() if known is family)}
    if ignore:
        section["ignore"] = list(ignore)
    for key, (name, default) in _translated_fields(family).items():
        value, problem = _value_of(key, name, default, unread, family)
        if problem is not None:
            problems.append(problem)
        if value is not None or (key == _WINDOW and default is not None):
            section[key] = value
    if "rope_theta" in family.model_fields:
        rotary, rotary_problems = _take_rotary(unread, section["max_position_embeddings"], family, ignore)
        section |= rotary
        problems += rotary_problems
    problems += _problems_of_unread(unread, family, ignore) + _not_ignorable(values, family, ignore)
    if problems:
        raise UnsupportedError([f"{origin}: {problem}" for problem in problems], section)
    return section


def to_hugging_face(model: FamilyConfig) -> dict[str, Any]:
    """Return the fields of a model's `config.json`, as transformers 4 and 5 read them, without dtype and token ids."""
    family = type(model)
    file = family.config_file
    keys = family.model_fields
    fields: dict[str, Any] = {"architectures": [file.architecture], "model_type": file.model_type}
    for key, (name, _) in _translated_fields(family).items():
        value = getattr(model, key)
        if key in file.null_if_derived and value == keys[key].get_default(
            call_default_factory=True, validated_data=vars(model)
        ):
            value = None
        fields[name] = value
    if file.has_window_switch:
        fields["use_sliding_window"] = fields[_WINDOW] is not None
    if file.max_window_layers is not None and fields[_WINDOW] is not None:
        # transformers read it before it knew `layer_types`.
        types = [*fields["layer_types"], _SLIDING]
        fields["max_window_layers"] = types.index(_SLIDING)
    if file.layer_interval is not None:
        # Programs that know no `layer_types`, such as mlx-lm, read the interval; other patterns have none.
        pattern = tuple(fields["layer_types"])
        intervals = [number for number in range(1, len(pattern) + 2) if every_nth_full(number, len(pattern)) == pattern]
        if intervals:
            fields[file.layer_interval] = intervals[0]
    fields |= {second: fields[name] for name, second in file.twice.items()} | dict(file.written)
    fields |= dict.fromkeys(file.absent)  # null, as their absence would mean another value
    if not model.ffn_dropout_p:
        fields.pop("ffn_dropout", None)  # only shardwise reads this field
    writes_heads = model.extends_positions if file.writes_derived_heads == "scaled" else file.writes_derived_heads
    if not writes_heads and model.head_dim * model.num_attention_heads == model.hidden_size:
        del fields["head_dim"]
    if "rope_theta" in keys:
        fields |= _rotary_fields(model)
    return fields


def _rotary_fields(model: FamilyConfig) -> dict[str, Any]:
    """Return the rotary fields of a file, for transformers 5 (`rope_parameters`) and for version 4 beside it."""
    keys = vars(model)
    theta = keys["rope_theta"]
    scaling = keys["rope_scaling"]
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    if model.window_rope_theta is not None:
        of_windows = {"rope_theta": model.window_rope_theta, "rope_type": "default"}
        parameters = {_FULL: parameters, _SLIDING: of_windows}
    base_field, fraction_field = type(model).config_file.rotary_fields
    fields = {"rope_parameters": parameters, "rope_scaling": scaling, base_field: theta}
    if "rotary_pct" in keys:
        parameters["partial_rotary_factor"] = fields[fraction_field] = keys["rotary_pct"]
    return fields


def _families_by_model_type() -> dict[str, type[FamilyConfig]]:
    return {family.config_file.model_type: family for family in FAMILIES.values()}


def _translated_fields(family: type[FamilyConfig]) -> dict[str, tuple[str, Any]]:
    """Map each key of a family to Hugging Face's field and its default; `None` where the family derives the default.

    `rope_theta`, `rope_scaling` and `rotary_pct` are not among them: Hugging Face writes them in several ways.
    """
    file = family.config_file
    fields = {}
    for key, info in family.model_fields.items():
        if key in _ONLY_IN_RECIPES or key in _ROTARY_KEYS:
            continue
        default = None if info.default_factory else info.default
        fields[key] = (file.names.get(key, key), file.defaults.get(key, default))
    return fields


def _fields_read(family: type[FamilyConfig]) -> set[str]:
    names = set(family.config_file.spellings)
    names.update(name for name, _ in _translated_fields(family).values())
    if "rope_theta" in family.model_fields:
        names.update(_ROTARY_KEYS, ("partial_rotary_factor", "rope_parameters", "rotary_emb_base"))
    return names


def _neutral_values() -> dict[str, tuple[Any, ...]]:
    """Map fields of single families to the values that mean the same as their absence in a family that lacks them."""
    neutral: dict[str, tuple[Any, ...]] = {}
    for family in FAMILIES.values():
        for name, value in family.config_file.only.items():
            # The other families have a key for tied embeddings, and other words for their positions: see below.
            if name not in ("position_embedding_type", "tie_word_embeddings"):
                neutral[name] = (value,)
    for family in FAMILIES.values():
        fields = _translated_fields(family)
        for role, key in family.keys.items():
            if role.endswith("_dropout"):
                neutral[fields[key][0]] = (0,)
    return neutral | {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1,),
        "position_embedding_type": ("rope", "rotary"),
        "rotary_pct": (1,),
        "use_parallel_residual": (False,),
    }


def _field_status(
    name: str, value: Any, family: type[FamilyConfig]
) -> Literal["inert", "neutral", "unsupported", "unknown"]:
    """Return the meaning of a field in a family's file, if it is none of the fields that are translated.

    The family's own words count before those for all families, and these before other families' fields.

    Returns:
        `inert`: it changes nothing, whatever its value. `neutral`: its value changes nothing. `unsupported`: it changes
        what the model computes. `unknown`: the family does not read it as far as is known here, but it may mean a model
        that computes something else, so the user decides (`model.ignore`).
    """
    file = family.config_file
    known = other_config_fields()
    only = {**known.only, **file.only}
    if name in file.inert or (known.is_inert(name) and name not in file.only):
        return "inert"
    if name in only:
        is_neutral = value is None or value == only[name] or (name in known.absent_if_empty and not value)
        return "neutral" if is_neutral else "unsupported"
    if name in _fields_read(family):
        # It was translated if it could be: what is left of it in another form cannot be taken for neutral.
        return "unsupported"
    is_neutral = value is None or value in _neutral_values().get(name, ())
    return "neutral" if is_neutral else "unknown"


def _value_of(
    key: str, name: str, default: Any, unread: dict[str, Any], family: type[FamilyConfig]
) -> tuple[Any, str | None]:
    """Take the field `name` out of `unread`; returns the value of our key, None to leave it out, and an error or None.

    With an error the value is the default.
    """
    file = family.config_file
    value = unread.pop(name, default)
    # In a file null stands for the default; of these fields it is a value by itself.
    if value is None and name not in (*_DERIVED, _WINDOW, "pad_token_id"):
        value = default
    if key == family.keys["activation"]:
        value = _SAME_ACTIVATION.get(str(value), value)
        supported = get_args(family.model_fields[key].annotation)
        if value not in supported:
            return default, _unsupported(name, value, supported)
    elif name in file.only and value != file.only[name]:
        return default, _unsupported(name, value, (file.only[name],))
    elif value is None and default is not None and name not in (*_DERIVED, _WINDOW):
        return default, f"{name} (null) is not supported: only an id"
    return value, None


def _take_layers(unread: dict[str, Any], family: type[FamilyConfig]) -> list[str]:
    """Take `no_rope_layer_interval` and `max_window_layers` out of `unread`; returns the errors in them.

    From them, `no_rope_layers` and `layer_types` are made where the file lacks these. Of a family without windows,
    `layer_types` may say nothing else than full attention, and is taken out too.
    """
    fields = _translated_fields(family)
    name, default = fields["num_hidden_layers"]
    layers = unread.get(name, default)
    if not isinstance(layers, int):
        layers = default  # pydantic refuses another type later
    problems = []
    types = unread.pop("layer_types", None)
    if "layer_types" in fields:
        interval = unread.pop(str(family.config_file.layer_interval), None)
        unread["layer_types"] = types or interval
        first = unread.pop("max_window_layers", family.config_file.max_window_layers)
        if not types and isinstance(first, int) and unread.get(_WINDOW, fields[_WINDOW][1]) is not None:
            unread["layer_types"] = [_FULL if layer < first else _SLIDING for layer in range(layers)]
    elif types and types != [_FULL] * layers:
        problems.append(f'layer_types ({_shown(types)}) is not supported: only "{_FULL}" for each of {layers} layers')
    if "no_rope_layers" in fields:
        interval = unread.pop("no_rope_layer_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            problems.append(f"no_rope_layer_interval ({_shown(interval)}) must be a positive whole number")
        elif unread.get("no_rope_layers") is None:
            unread["no_rope_layers"] = every_nth_without_rope(interval, layers)
    return problems


def _take_window_rotary(unread: dict[str, Any], family: type[FamilyConfig]) -> list[str]:
    """Put fields in the place of `rope_parameters` by type of layer; returns the errors in those of windows."""
    key = family.config_file.window_rotary_key
    parameters = unread.get("rope_parameters")
    if key is None or not isinstance(parameters, dict) or not {_FULL, _SLIDING} & set(parameters):
        return []
    unread["rope_parameters"] = parameters.get(_FULL)
    of_windows = parameters.get(_SLIDING) or {}
    base = of_windows.get("rope_theta")
    problems = []
    if scaling_with_one_type(of_windows).get("rope_type", "default") != "default":
        shown = _shown(of_windows)
        problems.append(f'rope_parameters.{_SLIDING} ({shown}) is not supported: only rope_type "default"')
    if key not in _ROTARY_KEYS:
        if base is not None:
            unread[key] = base
    elif base is not None and base != (parameters.get(_FULL) or {}).get("rope_theta", base):
        problems.append(f"rope_parameters.{_SLIDING}.rope_theta ({_shown(base)}) must be that of {_FULL}")
    return problems


def _one_spelling(values: Mapping[str, Any], family: type[FamilyConfig]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields under the family's names for them, and an error for each two spellings that differ."""
    fields = dict(values)
    problems = []
    for spelling, name in family.config_file.spellings.items():
        if spelling not in fields:
            continue
        value = fields.pop(spelling)
        if fields.setdefault(name, value) != value:
            problems.append(f"{spelling} ({_shown(value)}) and {name} ({_shown(fields[name])}) must be equal")
    return fields, problems


def _take_rotary(
    unread: dict[str, Any], longest: int, family: type[FamilyConfig], ignore: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Take the fields of rotary embeddings out of `unread`; returns our keys for them, and the errors in them.

    Fields of the mappings that no type of scaling has come into `unread`, unless `ignore` names them.

    As in transformers 5, `rope_scaling` counts before `rope_parameters`, and both before the fields beside them.
    """
    keys = family.model_fields
    is_partial = "rotary_pct" in keys
    length = unread.pop(LENGTH, None)
    problems = []
    mappings: list[dict[str, Any]] = []
    for name in ("rope_scaling", "rope_parameters"):
        value = unread.pop(name, None) or {}
        if not isinstance(value, dict):
            problems.append(f"{name} ({_shown(value)}) must be an object")
            value = {}
        unknown = [key for key in unknown_scaling_fields(value) if key not in _MOVED]
        unread |= {f"{name}.{key}": value[key] for key in unknown if key not in ignore}
        known = {key: inner for key, inner in value.items() if key not in unknown}
        # A length beside the mappings counts before one in them, where their type needs it.
        mappings.append({**known, LENGTH: length} if value and length is not None else known)
    old, new = mappings
    chosen = old or new
    section: dict[str, Any] = {"rope_scaling": _scaling(chosen, longest)}
    if old and new and section["rope_scaling"] != _scaling(new, longest):
        problems.append(f"rope_scaling ({_shown(old)}) and rope_parameters ({_shown(new)}) must say the same")
    # Our key, Hugging Face's two names, and the default.
    base_field, fraction_field = family.config_file.rotary_fields
    for key, names, source, default in (
        ("rope_theta", ("rope_theta", "rotary_emb_base"), base_field, keys["rope_theta"].default),
        (
            *("rotary_pct", ("partial_rotary_factor", "rotary_pct"), fraction_field),
            keys["rotary_pct"].default if is_partial else 1.0,
        ),
    ):
        values = (chosen.get(names[0]), unread.get(source), default)
        section[key] = effective = next(value for value in values if value is not None)
        given = {name: unread.pop(name, None) for name in names} | {f"rope_parameters.{n}": new.get(n) for n in names}
        problems += [
            f"{place} ({_shown(value)}) must be {_shown(effective)}, which Hugging Face reads from rope_scaling, "
            f"rope_parameters or {source}"
            for place, value in given.items()
            if value is not None and value != effective
        ]
    if not is_partial and (fraction := section.pop("rotary_pct")) != 1.0:
        problems.append(_unsupported("partial_rotary_factor", fraction, (1.0,)))
    return section, problems


def _scaling(parameters: Mapping[str, Any], longest: int) -> dict[str, Any] | None:
    scaling = scaling_with_one_type(
        {key: value for key, value in parameters.items() if key not in _MOVED and value is not None}
    )
    return effective_scaling({"rope_type": "default", **scaling}, longest)


def _problems_of_unread(unread: Mapping[str, Any], family: type[FamilyConfig], ignore: Collection[str]) -> list[str]:
    """Return an error for each field that was not translated and has another value than the one that changes nothing.

    The fields that no family knows are one error, with the key that leaves them out.
    """
    file = family.config_file
    only = {**other_config_fields().only, **file.only}
    problems = [
        f"{name} is missing, which means {_shown(value)}: only {_shown(only[name])} is supported"
        for name, value in file.absent.items()
        if name not in unread and name in only
    ]
    unknown = []
    for name, value in unread.items():
        meaning = _field_status(name, value, family)
        if meaning == "unsupported":
            problems.append(_unsupported(name, value, (only[name],)))
        elif meaning == "unknown" and name not in ignore:
            unknown.append(name)
    if unknown:
        shown = listing(f"{name} ({_shown(unread[name])})" for name in unknown)
        are, they = ("is no field", "it changes") if len(unknown) == 1 else ("are no fields", "they change")
        problems.append(
            f"{shown} {are} that shardwise knows: if {they} nothing that the model computes, set "
            f"{_override([*ignore, *unknown])}"
        )
    return problems


def _not_ignorable(values: Mapping[str, Any], family: type[FamilyConfig], ignore: Collection[str]) -> list[str]:
    """Return an error for the fields of the file that `model.ignore` names although they change the computation."""
    names = [name for name in ignore if name in values and _field_status(name, values[name], family) == "unsupported"]
    if not names:
        return []
    change = "changes" if len(names) == 1 else "change"
    return [f"model.ignore must not name {listing(names)}, which {change} what a model computes"]


def _override(names: Iterable[str]) -> str:
    shown = [
        name if re.fullmatch(r"[A-Za-z_][\w.-]*", name) and yaml_scalar(name) == name else json.dumps(name)
        for name in names
    ]
    override = f"model.ignore=[{','.join(shown)}]"
    return shlex.quote(override) if '"' in override else override


def _unsupported(name: str, value: Any, valid: Iterable[Any]) -> str:
    return f"{name} ({_shown(value)}) is not supported: only {listing(map(_shown, valid), 'or')}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
