"""Rules of the sizes that tensor parallelism cuts, and of `train.bitwise`, which divides sums into parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.base.errors import divisors, listing, nearest_multiples, nearest_numbers
from shardwise.config.data import MASKED_FRACTION
from shardwise.config.layout import Layout
from shardwise.config.model import ModelConfig
from shardwise.config.run_config import Config
from shardwise.config.sections import gradient_groups

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


def tensor_problems(config: Config, sequence: bool) -> list[str]:
    """Return why the model's sizes cannot be cut over `parallel.tensor` ranks; `sequence`: the sequence is cut too."""
    model = config.model
    tensor = config.parallel.tensor
    length = config.train.sequence_length
    reasons = _tensor_misfits(model, tensor, length if sequence else None, " with parallel.sequence")
    if not reasons:
        return []
    # No degree above the smallest of the sizes divides them all.
    sizes = (model.num_attention_heads, model.intermediate_size, length)
    most = min(size for size in sizes if size is not None)
    length_to_cut = length if config.parallel.sequence else None
    valid = [degree for degree in range(1, most + 1) if not _tensor_misfits(model, degree, length_to_cut)]
    degrees = f"valid degrees are {listing(valid)}" if len(valid) > 1 else "the only valid degree is 1"
    return [f"parallel.tensor ({tensor}) must {reason}: {degrees}" for reason in reasons]


FP8_MULTIPLE = 16
"""The number of which GPUs want the widths of fp8 products to be multiples."""


def context_problems(config: Config, sequence: bool) -> list[str]:
    """Return why samples cannot be shared by `parallel.context` ranks; `sequence`: tensor parallelism cuts them too."""
    context = config.parallel.context
    cuts = config.parallel.sequence_parts if config.train.bitwise else context
    if cuts == 1:
        return []
    named = f"parallel.context ({context})" if context > 1 else f"parallel.context_grain ({cuts})"
    named += " must be 1 with"
    family = config.model.family
    if config.model.is_own:
        return [f"{named} model.family {family}, a model of your own, whose attention reads the keys of its rank alone"]
    if "mlm" in config.model.objectives:
        return [
            f"{named} model.family {family}, whose tokens attend to later ones: set parallel.tensor={context} instead"
        ]
    problems = []
    if config.passes_keys:
        must = "parallel.context_keys (ring) must be gather with"
        if config.train.bitwise:
            problems.append(f"{must} train.bitwise (true): the order of its sums follows the ranks")
        if config.compile.enabled:
            problems.append(f"{must} compile.enabled (true), whose graphs of a block have no messages between kernels")
        dropout = config.model.attention_dropout_p
        if dropout:
            problems.append(f"{must} dropout of attention ({dropout}), which no kernel computes for the keys of a rank")
    length = config.train.sequence_length
    parts = 2 * context * (config.parallel.tensor if sequence else 1)
    factors = "2 × parallel.context × parallel.tensor" if sequence else "2 × parallel.context"
    if config.train.bitwise:
        # Parts are cut over tensor-parallel ranks, and halves of them are chunks.
        parts = cuts * max(config.parallel.grain, 2)
        factors = (
            "parallel.context_grain × parallel.grain" if config.parallel.grain > 1 else "2 × parallel.context_grain"
        )
    if length % parts:
        near = listing(nearest_multiples(length, parts), "or")
        problems.append(f"train.sequence_length ({length}) must be a multiple of {factors} ({parts}): nearest {near}")
    return problems


def fp8_problems(config: Config) -> list[str]:
    """Refuse widths of a rank's products, and tokens of a micro-batch, that `precision.matmul` fp8 does not take.

    The widths of a model of the user's own are checked where it is built (`models/user_model.py`).
    """
    if config.precision.matmul is None:
        return []
    train = config.train
    context = config.parallel.context
    tokens = train.sequence_length * train.micro_batch // context
    product = "train.sequence_length × train.micro_batch" + (" / parallel.context" if context > 1 else "")
    sizes = {f"{product} ({tokens})": tokens}
    model = config.model
    if not model.is_own:
        tensor = config.parallel.tensor
        query = model.num_attention_heads * model.head_dim // tensor
        key_value = max(model.num_key_value_heads // tensor, 1) * model.head_dim
        feed_width = model.intermediate_size // tensor
        cut = f"of {tensor} ranks" if tensor > 1 else "of the rank"
        sizes |= {
            f"model.hidden_size ({model.hidden_size})": model.hidden_size,
            f"the part of model.intermediate_size that each {cut} has ({feed_width})": feed_width,
            f"the width of the queries that each {cut} has ({query})": query,
            f"the width of the queries, keys and values that each {cut} has ({query + 2 * key_value})": query
            + 2 * key_value,
        }
    return [
        f"{name} must be a multiple of {FP8_MULTIPLE} with precision.matmul (fp8): change the model's or the batch's "
        "sizes or parallel.tensor, or leave precision.matmul out"
        for name, size in sizes.items()
        if size % FP8_MULTIPLE
    ]


def bitwise_problems(config: Config, layout: Layout) -> list[str]:
    """Refuse layouts and keys with which `train.bitwise` could not give the bits of one process."""
    if not config.train.bitwise:
        return []
    parallel = config.parallel
    train = config.train
    problems = _grain_problems("parallel.grain", parallel.grain, "parallel.tensor", layout.tensor)
    misfits = _tensor_misfits(config.model, parallel.grain, train.sequence_length)
    if misfits and _is_power_of_two(parallel.grain):
        valid = [2**n for n in range(parallel.grain.bit_length())]
        valid = [grain for grain in valid if not _tensor_misfits(config.model, grain, train.sequence_length)]
        problems += [
            f"parallel.grain ({parallel.grain}) must {reason} with train.bitwise (true): set parallel.grain={valid[-1]}"
            for reason in misfits
        ]
    cuts = parallel.sequence_parts
    problems += _grain_problems("parallel.context_grain", cuts, "parallel.context", layout.context)
    if cuts > 1 and config.precision.matmul is not None:
        problems.append(
            f"precision.matmul ({config.precision.matmul}) must be left out with parallel.context_grain ({cuts}): "
            "its scales are those of all tokens of a rank"
        )
    if cuts > 1 and config.compile.enabled:
        problems.append(
            f"compile.enabled (true) must be false with parallel.context_grain ({cuts}): compiled blocks take all "
            "tokens of a rank at once"
        )
    groups = train.gradient_groups
    problems += _grain_problems("train.data_grain", groups, "the data-parallel degree", layout.data)
    if train.micro_batches % groups and _is_power_of_two(groups):
        problems.append(
            f"train.data_grain ({groups}) must divide the micro-batches of a step, train.global_batch / "
            f"train.micro_batch ({train.micro_batches}): leave it out"
        )
    if parallel.tensor_overlap is not None:
        problems.append(
            f"parallel.tensor_overlap ({parallel.tensor_overlap}) must be null with train.bitwise: it multiplies "
            "pieces whose size depends on the layout"
        )
    if config.model.has_dropout and train.dropout_mode != "invariant":
        problems.append(
            f"train.dropout_mode ({train.dropout_mode}) must be invariant with train.bitwise (true): other masks "
            "depend on the layout"
        )
    precision = config.precision.resolved(accelerator=False)
    if precision.reduce != precision.gradient:
        problems.append(
            f"precision.reduce ({precision.reduce}) must be precision.gradient ({precision.gradient}) with "
            "train.bitwise (true): sums within a rank and sums over ranks would round differently, set "
            f"precision.reduce={precision.gradient}"
        )
    return problems


def sharding_problems(config: Config, layout: Layout) -> list[str]:
    """Refuse keys of ZeRO that do not fit the data-parallel degree, the schedule or `train.bitwise`."""
    problems = []
    replicate = config.parallel.replicate
    optimizer = config.optimizer
    if layout.replicas % replicate:
        near = listing(map(str, nearest_numbers(replicate, divisors(layout.replicas))), "or")
        degree = f"the data-parallel degree ({layout.data})"
        if layout.context > 1:
            degree = f"the data-parallel degree × parallel.context ({layout.data} × {layout.context})"
        problems.append(f"parallel.replicate ({replicate}) must divide {degree}: set it to {near}")
    rounding = config.precision.resolved(accelerator=True).rounding
    if optimizer.offload and rounding == "stochastic":
        problems.append(
            "optimizer.offload (true) must be false with precision.rounding stochastic, whose random bits the device "
            "draws: leave it out, or set precision.mode=mixed"
        )
    if config.precision.moments == "bfloat16" and rounding != "stochastic":
        if optimizer.spec.needs_whole_tensors:
            problems.append(
                f"precision.moments (bfloat16) must be left out with optimizer.name {optimizer.name}, whose update of "
                "whole tensors keeps float32 moments: set optimizer.name=adamw"
            )
        if optimizer.offload:
            problems.append(
                "optimizer.offload (true) must be false with precision.moments bfloat16, which the device rounds by "
                "random bits: leave out one of them"
            )
    if optimizer.zero >= 2 and config.splits_backward:
        problems += [
            f"optimizer.{key} (micro_batch) must be step with parallel.schedule {config.parallel.schedule}, which "
            "splits the backward pass: leave it out"
            for key in ("reduce", "gather")
            if getattr(optimizer, key) == "micro_batch"
        ]
    elif optimizer.zero >= 2 and config.train.bitwise and optimizer.reduce == "micro_batch":
        problems.append(
            "optimizer.reduce (micro_batch) must be step with train.bitwise (true), whose sum adds the micro-batches "
            "of a rank before the ranks: leave it out"
        )
    return problems


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


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _tensor_misfits(model: ModelConfig, tensor: int, sequence_length: int | None, condition: str = "") -> list[str]:
    """Reasons why `tensor` ranks cannot divide the model's sizes; a model of the user's own may have none of them."""
    sizes = (
        ("model.num_attention_heads", model.num_attention_heads),
        ("model.intermediate_size", model.intermediate_size),
    )
    reasons = [f"divide {key} ({value})" for key, value in sizes if value is not None and value % tensor]
    kv_heads = model.num_key_value_heads
    # With more ranks than key/value heads, neighbouring ranks hold the same head: each needs equally many ranks.
    if kv_heads is not None and kv_heads != model.num_attention_heads and kv_heads % tensor and tensor % kv_heads:
        reasons.append(f"divide or be a multiple of model.num_key_value_heads ({kv_heads})")
    if sequence_length is not None and sequence_length % tensor:
        reasons.append(f"divide train.sequence_length ({sequence_length}){condition}")
    return reasons


def masking_problems(config: Config) -> list[str]:
    """Refuse the masking keys with families that mask no tokens, and more masked tokens than a sequence has."""
    data = config.data
    length = config.train.sequence_length
    if "mlm" in config.model.objectives:
        if data.max_predictions is None or data.max_predictions <= length:
            return []
        return [f"data.max_predictions ({data.max_predictions}) must be at most train.sequence_length ({length})"]
    unused = f"must be left out: model.family {config.model.family} predicts the next token and masks none"
    problems = []
    if data.max_predictions is not None:
        problems.append(f"data.max_predictions ({data.max_predictions}) {unused}")
    if data.masked_fraction != MASKED_FRACTION:
        problems.append(f"data.masked_fraction ({data.masked_fraction}) {unused}")
    return problems
