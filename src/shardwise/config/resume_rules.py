"""Keys of a run's configuration that may change when the run is resumed, and those that have changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.config.load import config_from
from shardwise.config.sections import Config, share_of

_FIXED_SECTIONS = ("model", "data")
_FREE_KEYS = ("data.workers", "model.ignore")
_FIXED_KEYS = (
    "train.seed", "train.sequence_length", "train.dropout_mode", "optimizer.name", "hooks.data", "hooks.loss",
    "hooks.optimizer",
)  # fmt: skip


def resume_problems(stored: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Reasons why a run with the configuration `stored` cannot be resumed with `new`; an empty list if it can.

    Model, data, seed and the kind of optimizer state must stay: otherwise the checkpoint does not fit, or the loss
    curve is not that of one run. All differences are in one text, with both values.

    Args:
        stored, new: resolved configurations, as nested mappings.
    """
    try:
        before = _complete(stored)
    except ConfigError as error:
        listed = "\n".join(f"  {problem}" for problem in error.problems)
        return [f"the configuration of the run in this folder is not valid:\n{listed}\nchoose another --run-dir"]
    changes = [
        f"  {key} ({_shown(now)}) must be {_shown(then)}" for key, then, now in _changes(before, new, fixed=True)
    ]
    if not changes:
        return []
    listed = "\n".join(changes)
    return [
        f"the run in this folder can be resumed only with the model and data that it began with:\n{listed}\n"
        f"set {'it' if len(changes) == 1 else 'them'} back, or start a new run in another --run-dir, with "
        "checkpoint.load for the weights of this one"
    ]


def resume_changes(stored: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The changes when the run is resumed, one line for each key, such as `train.steps 240 → 480`."""
    changes = _changes(_complete(stored), new, fixed=False)
    return [f"{key} {_shown(then)} → {_shown(now)}" for key, then, now in changes]


def kept_batch(stored: Mapping[str, Any], config: Config) -> int | None:
    """The global batch that the run keeps where `config` gives it by a rule; None where the rule is a new one.

    A run of a version that had no rules keeps its number: nobody knows the rule by which it began.
    """
    rule = config.train.batch_rule
    if config.train.rule is None or share_of(stored["train"].get("batch_rule", rule)) != share_of(rule):
        return None
    number: int = _complete(stored)["train"]["global_batch"]
    return number


def kept_batch_note(stored: Mapping[str, Any], config: Config) -> str | None:
    """The line for the user of a run that keeps its global batch, whatever its rule gives on the present ranks."""
    kept = kept_batch(stored, config)
    if kept is None:
        return None
    return f"global batch: {kept} is kept, as the run in this folder has it; train.global_batch=NUMBER changes it"


def _complete(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored configuration with defaults for keys that were added to shardwise after it was written."""
    return config_from(stored).recorded()


def _changes(stored: Mapping[str, Any], new: Mapping[str, Any], *, fixed: bool) -> Iterator[tuple[str, object, object]]:
    """(key, value then, value now) of the keys that may not change (`fixed`), or of those that may."""
    then, now = (
        {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}
        for values in (stored, new)
    )
    for key in now | then:
        is_fixed = key in _FIXED_KEYS or (key.partition(".")[0] in _FIXED_SECTIONS and key not in _FREE_KEYS)
        if is_fixed == fixed and then.get(key) != now.get(key):
            yield key, then.get(key), now.get(key)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
