"""Rules of a run that is resumed, whose keys may change only in part."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from shardwise.base.errors import ConfigError, raise_problems
from shardwise.config.data import MixedSource
from shardwise.config.load import config_from_sections
from shardwise.config.run_config import Config
from shardwise.config.sections import TrainConfig, batch_per_rank, gradient_groups

KEYS_OF_BITS = (
    "train.micro_batch", "train.data_grain", "train.threads", "parallel.grain", "parallel.context_grain",
    "parallel.vocab_multiple", "compile.enabled",
)  # fmt: skip
"""Keys that a run with `train.bitwise` keeps: the shapes and the order of its sums follow from them."""
# What decides the weights, the samples and their order, and the optimizer's state. Degrees of parallelism are free: a
# checkpoint is the same at every layout.
_FIXED_SECTIONS = ("model", "data")
_FREE_KEYS = ("data.workers", "model.ignore")
_FIXED_KEYS = (
    "train.seed", "train.sequence_length", "train.dropout_mode", "optimizer.name", "hooks.data", "hooks.loss",
    "hooks.optimizer",
)  # fmt: skip
_NEEDED_BY_THE_CHECKPOINT = ("model", "optimizer.name", "hooks.optimizer")
"""Sections and keys without which a checkpoint's tensors do not fit: no flag lets them change."""


def check_changes(keys: Sequence[str]) -> frozenset[str]:
    """Return the keys that `--change` names; ConfigError if one may change anyway, or never."""
    problems = []
    for key in keys:
        section, _, name = key.partition(".")
        field = Config.model_fields.get(section)
        known = field.annotation.model_fields if field is not None and isinstance(field.annotation, type) else {}
        if section in _NEEDED_BY_THE_CHECKPOINT or key in _NEEDED_BY_THE_CHECKPOINT:
            problems.append(f"--change {key}: the checkpoint of a run fits no other {key}; start a new run")
        elif name not in known:
            problems.append(f"--change {key}: there is no such key")
        elif not _is_fixed(key) and key not in KEYS_OF_BITS:
            problems.append(f"--change {key} must be left out: this key may change in any run")
    raise_problems(ConfigError, problems)
    return frozenset(keys)


def resume_problems(stored: Mapping[str, Any], new: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """Reasons why a run with the configuration `stored` cannot be resumed with `new`; an empty list if it can.

    Model, data, seed and the kind of optimizer state must stay: otherwise the checkpoint does not fit, or the loss
    curve is not that of one run.

    Args:
        stored, new: resolved configurations, as nested mappings.
        allowed: keys that may differ (`check_changes`).
    """
    try:
        before = _complete(stored)
    except ConfigError as error:
        listed = "\n".join(f"  {problem}" for problem in error.problems)
        return [f"the configuration of the run in this folder is not valid:\n{listed}\nchoose another --run-dir"]
    changes = fixed_changes(before, new, allowed)
    if not changes:
        return []
    listed = "\n".join(f"  {change}" for change in changes)
    keys = dict.fromkeys(_top_key(change.partition(" ")[0]) for change in changes)
    flags = " ".join(f"--change {key}" for key in keys)
    fits = not any(key.startswith(_NEEDED_BY_THE_CHECKPOINT) for key in keys)
    change = f", or let the run go on with {'it' if len(keys) == 1 else 'them'} by {flags}" if fits else ""
    # The weights of another model do not fit.
    load = "" if any(key.startswith("model") for key in keys) else ", with checkpoint.load for the weights of this one"
    return [
        f"the run in this folder can be resumed only with the model and data that it began with:\n{listed}\n"
        f"set {'it' if len(changes) == 1 else 'them'} back{change}, or start a new run in another --run-dir{load}"
    ]


def fixed_changes(stored: Mapping[str, Any], new: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """The changes of keys that may not change in a run, such as `train.seed (2) must be 1`, without `allowed` ones."""
    return [
        f"{key} ({_shown(now)}) must be {_shown(then)}"
        for key, then, now in _changes(stored, new, fixed=True)
        if _top_key(key) not in allowed
    ]


def resume_changes(stored: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The changes when the run is resumed, one line for each key, such as `train.steps 240 → 480`."""
    before = _complete(stored)
    changes = [*_changes(before, new, fixed=True), *_changes(before, new, fixed=False)]
    return [f"{key} {_shown(then)} → {_shown(now)}" for key, then, now in changes]


def kept_batch(stored: Mapping[str, Any], train: TrainConfig) -> int | None:
    """The global batch that a resumed run keeps where `train` gives it by a rule; None where the rule is a new one.

    A run of a version that had no rules keeps its number: nobody knows the rule by which it began.
    """
    rule = train.batch_rule
    if train.rule is None or batch_per_rank(stored["train"].get("batch_rule", rule)) != batch_per_rank(rule):
        return None
    number: int = _complete(stored)["train"]["global_batch"]
    return number


def kept_batch_note(stored: Mapping[str, Any], train: TrainConfig) -> str | None:
    """The note that a resumed run keeps its global batch, whatever its rule gives on these ranks."""
    kept = kept_batch(stored, train)
    if kept is None:
        return None
    return f"global batch: {kept} is kept, as the run in this folder has it; train.global_batch=NUMBER changes it"


def _complete(stored: Mapping[str, Any]) -> dict[str, Any]:
    return config_from_sections(stored).recorded()


def _changes(stored: Mapping[str, Any], new: Mapping[str, Any], *, fixed: bool) -> Iterator[tuple[str, object, object]]:
    then, now = map(_by_key, (stored, new))
    extra_keys = _keys_of_bits(then, now)
    for key in now | then:
        if (_is_fixed(key) or key in extra_keys) == fixed and then.get(key) != now.get(key):
            yield key, then.get(key), now.get(key)


def _top_key(key: str) -> str:
    """The section and the key in it: `data.mixture` of `data.mixture.web`."""
    return ".".join(key.split(".")[:2])


def _by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    by_key = {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}
    defaults = {name: field.default for name, field in MixedSource.model_fields.items()}
    for name, source in by_key.pop("data.mixture", {}).items():
        by_key[f"data.mixture.{name}"] = {key: value for key, value in source.items() if value != defaults[key]}
    return by_key


def _is_fixed(key: str) -> bool:
    return key in _FIXED_KEYS or (key.partition(".")[0] in _FIXED_SECTIONS and key not in _FREE_KEYS)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _keys_of_bits(then: dict[str, Any], now: dict[str, Any]) -> Sequence[str]:
    """Return the `KEYS_OF_BITS` that must stay, from the values of a run and of its continuation by key.

    None must if one of the two has no `train.bitwise`. Grains that follow from other keys get their values.
    """
    if not (then.get("train.bitwise") is True and now.get("train.bitwise") is True):
        return ()
    for values in (then, now):
        micro_batches = values["train.global_batch"] // values["train.micro_batch"]
        values["train.data_grain"] = gradient_groups(values["train.data_grain"], micro_batches)
        # A run of an earlier version has neither key.
        cuts = values.get("parallel.context_grain") or values.get("parallel.context", 1)
        values["parallel.context_grain"] = cuts
    return KEYS_OF_BITS
