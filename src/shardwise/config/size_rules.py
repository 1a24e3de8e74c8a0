"""Rules of the sizes that tensor and context parallelism cut, and of those that fp8 products take."""

from __future__ import annotations

import math

from shardwise.base.errors import divisors, listing, nearest_multiples, nearest_numbers
from shardwise.config.base_section import RuleTable, broken
from shardwise.config.layout import Layout
from shardwise.config.model import ModelConfig
from shardwise.config.run_config import Config
from shardwise.config.sections import ParallelConfig, TrainConfig


def tensor_problems(model: ModelConfig, parallel: ParallelConfig, length: int) -> list[str]:
    """Return why the model's sizes, and samples of this length, cannot be cut over `parallel.tensor` ranks."""
    tensor = parallel.tensor
    length_to_cut = length if parallel.sequence else None
    reasons = tensor_misfits(model, tensor, length_to_cut if tensor > 1 else None, " with parallel.sequence")
    if not reasons:
        return []
    # No degree above the smallest of the sizes divides them all.
    sizes = (model.num_attention_heads, model.intermediate_size, _width_of_experts(model), length)
    most = min(size for size in sizes if size is not None)
    valid = [degree for degree in range(1, most + 1) if not tensor_misfits(model, degree, length_to_cut)]
    degrees = f"valid degrees are {listing(valid)}" if len(valid) > 1 else "the only valid degree is 1"
    return [f"parallel.tensor ({tensor}) must {reason}: {degrees}" for reason in reasons]


_RULES_OF_EXPERTS: RuleTable = {
    "is_bit_equal parallel.cuts_sequence": (
        "{parallel.context_grain} must be 1 with train.bitwise (true) and model.family {=model.family}, whose experts "
        "take the tokens of all parts of a sequence at once",
    ),
    "": (
        "{compile.enabled} must be false with model.family {=model.family}: the numbers of rows of its experts change "
        "in every step",
        "{precision.matmul} must be left out with model.family {=model.family}: products of experts have no scales",
    ),
}

_RULES_OF_SIGMOIDS: RuleTable = {
    "": (
        "{optimizer.router_pooled_loss} must be 0 with model.family {=model.family}, for whose scores transformers "
        "defines no balance loss: set optimizer.router_batch_loss or optimizer.router_sequence_loss",
    ),
}
_RULES_WITHOUT_EXPERTS: RuleTable = {
    fact: [
        f"{{optimizer.router_{name}_loss}} must be 0 with model.family {{=model.family}}, {reason}"
        for name in ("sequence", "batch", "pooled", "z")
    ]
    for fact, reason in {"!model.is_own": "which has no experts", "model.is_own": "whose routers nobody knows"}.items()
}

FP8_MULTIPLE = 16
"""The number of which GPUs want the widths of fp8 products to be multiples."""


def context_problems(config: Config, sequence: bool) -> list[str]:
    """Return why samples cannot be shared by `parallel.context` ranks; `sequence`: tensor parallelism cuts them too."""
    context = config.parallel.context
    cuts = config.grains.get("cp", context)
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
    length = config.train.sequence_length
    parts = 2 * context * (config.parallel.tensor if sequence else 1)
    factors = "2 × parallel.context × parallel.tensor" if sequence else "2 × parallel.context"
    if config.is_bit_equal:
        # Parts are cut over tensor-parallel ranks, and halves of them are chunks.
        parts = cuts * max(config.parallel.grain, 2)
        factors = (
            "parallel.context_grain × parallel.grain" if config.parallel.grain > 1 else "2 × parallel.context_grain"
        )
    if length % parts == 0:
        return []
    near = listing(nearest_multiples(length, parts), "or")
    return [f"train.sequence_length ({length}) must be a multiple of {factors} ({parts}): nearest {near}"]


def expert_problems(config: Config, layout: Layout) -> list[str]:
    """Return why the experts of a block cannot be divided over `parallel.expert` ranks, or not trained so."""
    model = config.model
    expert = layout.expert
    routing = None if model.is_own else model.any_routing
    if routing is None:
        none = f"parallel.expert ({expert}) must be 1 with model.family {model.family}, which has no experts"
        return ([none] if expert > 1 else []) + broken(_RULES_WITHOUT_EXPERTS, config)
    problems = []
    ranks = layout.replicas // config.parallel.replicate
    if routing.experts % expert:
        near = listing(nearest_numbers(expert, divisors(routing.experts)), "or")
        problems.append(
            f"parallel.expert ({expert}) must divide the experts of a block ({routing.experts}): nearest {near}"
        )
    elif ranks % expert:
        near = listing(nearest_numbers(expert, divisors(math.gcd(ranks, routing.experts))), "or")
        problems.append(
            f"parallel.expert ({expert}) must divide the data-parallel degree × parallel.context / parallel.replicate "
            f"({layout.data} × {layout.context} / {config.parallel.replicate}): nearest {near}"
        )
    if routing.scores == "sigmoid":
        problems += broken(_RULES_OF_SIGMOIDS, config)
    return problems + broken(_RULES_OF_EXPERTS, config)


def fp8_problems(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> list[str]:
    """Refuse widths of a rank's products, and tokens of a micro-batch, that `precision.matmul` fp8 does not take.

    The widths of a model of the user's own are checked where it is built (`models/user_model.py`).
    """
    context = parallel.context
    tokens = train.sequence_length * train.micro_batch // context
    product = "train.sequence_length × train.micro_batch" + (" / parallel.context" if context > 1 else "")
    sizes = {f"{product} ({tokens})": tokens}
    if not model.is_own:
        tensor = parallel.tensor
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


def tensor_misfits(model: ModelConfig, tensor: int, sequence_length: int | None, condition: str = "") -> list[str]:
    """Reasons why `tensor` ranks cannot divide the model's sizes; a model of the user's own may have none of them."""
    sizes = (
        ("model.num_attention_heads", model.num_attention_heads),
        ("model.intermediate_size", model.intermediate_size),
        ("model.moe_intermediate_size", _width_of_experts(model)),
    )
    reasons = [f"divide {key} ({value})" for key, value in sizes if value is not None and value % tensor]
    kv_heads = model.num_key_value_heads
    # With more ranks than key/value heads, neighbouring ranks hold the same head: each needs equally many ranks.
    if kv_heads is not None and kv_heads != model.num_attention_heads and kv_heads % tensor and tensor % kv_heads:
        reasons.append(f"divide or be a multiple of model.num_key_value_heads ({kv_heads})")
    if sequence_length is not None and sequence_length % tensor:
        reasons.append(f"divide train.sequence_length ({sequence_length}){condition}")
    return reasons


def _width_of_experts(model: ModelConfig) -> int | None:
    """Return the width of an expert where it has a key of its own, and a block has experts."""
    if model.is_own or model.any_routing is None or model.expert_width == model.intermediate_size:
        return None
    return model.expert_width
