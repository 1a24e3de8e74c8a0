"""Rules of `train.bitwise`, which gives the bits of one process at any layout by dividing sums into parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.base.errors import listing, nearest_numbers
from shardwise.config.layout import Layout
from shardwise.config.rule import RuleTable, broken
from shardwise.config.run_config import Config
from shardwise.config.sections import gradient_groups
from shardwise.config.size_rules import tensor_misfits

KEYS_OF_BITS = (
    "train.micro_batch", "train.data_grain", "train.threads", "parallel.grain", "parallel.context_grain",
    "parallel.vocab_multiple", "compile.enabled",
)  # fmt: skip
"""Keys that a run with `train.bitwise` keeps: the shapes and the order of its sums follow from them."""


def keys_of_bits(then: dict[str, Any], now: dict[str, Any]) -> Sequence[str]:
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


_RULES: RuleTable = {
    "": (
        "{parallel.tensor_overlap} must be null with train.bitwise: it multiplies pieces whose size depends on the "
        "layout",
    ),
    "passes_keys": (
        "parallel.context_keys (ring) must be gather with train.bitwise (true): the order of its sums follows the "
        "ranks",
    ),
    "parallel.cuts_sequence": (
        "{precision.matmul} must be left out with parallel.context_grain ({=parallel.sequence_parts}): its scales are "
        "those of all tokens of a rank",
        "{compile.enabled} must be false with parallel.context_grain ({=parallel.sequence_parts}): compiled blocks "
        "take all tokens of a rank at once",
    ),
    "model.has_dropout": (
        "{train.dropout_mode=fast} must be invariant with train.bitwise (true): other masks depend on the layout",
    ),
    "optimizer.cuts_gradients !splits_backward": (
        "{optimizer.reduce=micro_batch} must be step with train.bitwise (true), whose sum adds the micro-batches of a "
        "rank before the ranks: leave it out",
    ),
}


def bitwise_problems(config: Config, layout: Layout) -> list[str]:
    """Refuse layouts and keys with which `train.bitwise` could not give the bits of one process."""
    if not config.is_bit_equal:
        return []
    train = config.train
    grain = config.parallel.grain
    problems = _grain_problems("parallel.grain", grain, "parallel.tensor", layout.tensor)
    misfits = tensor_misfits(config.model, grain, train.sequence_length)
    if misfits and _is_power_of_two(grain):
        valid = [2**n for n in range(grain.bit_length())]
        fitting = [part for part in valid if not tensor_misfits(config.model, part, train.sequence_length)]
        problems += [
            f"parallel.grain ({grain}) must {reason} with train.bitwise (true): set parallel.grain={fitting[-1]}"
            for reason in misfits
        ]
    cuts = config.parallel.sequence_parts
    problems += _grain_problems("parallel.context_grain", cuts, "parallel.context", layout.context)
    problems += _grain_problems("train.data_grain", train.gradient_groups, "the data-parallel degree", layout.data)
    groups = train.gradient_groups
    if train.micro_batches % groups and _is_power_of_two(groups):
        problems.append(
            f"train.data_grain ({groups}) must divide the micro-batches of a step, train.global_batch / "
            f"train.micro_batch ({train.micro_batches}): leave it out"
        )
    precision = config.precision.resolved(accelerator=False)
    if precision.reduce != precision.gradient:
        problems.append(
            f"precision.reduce ({precision.reduce}) must be precision.gradient ({precision.gradient}) with "
            "train.bitwise (true): sums within a rank and sums over ranks would round differently, set "
            f"precision.reduce={precision.gradient}"
        )
    return problems + broken(_RULES, config)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _grain_problems(key: str, grain: int, degree_key: str, degree: int) -> list[str]:
    """Return why sums of `grain` parts cannot be divided over `degree` ranks."""
    if not _is_power_of_two(grain):
        nearest = listing([2 ** (grain.bit_length() - 1), 2 ** grain.bit_length()], "or")
        return [f"{key} ({grain}) must be a power of two with train.bitwise (true): set {key}={nearest}"]
    if grain % degree:
        valid = [2**n for n in range(grain.bit_length())]
        nearest = listing(nearest_numbers(degree, valid), "or")
        return [
            f"{degree_key} ({degree}) must divide {key} ({grain}) with train.bitwise (true): nearest {nearest}, or "
            f"another {key} from the run's first step on"
        ]
    return []
