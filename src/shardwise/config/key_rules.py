"""Rules of keys of several sections that must not go together, whatever the number of ranks; and rules of sizes."""

from __future__ import annotations

import math
import re

from shardwise.base.errors import listing, see
from shardwise.config.base_section import RuleTable, broken_rules, divisors, nearest_multiples, nearest_numbers
from shardwise.config.data import MASKED_FRACTION, PYTHON_NAME, DataConfig
from shardwise.config.layout import Layout
from shardwise.config.model import ModelConfig
from shardwise.config.optimizer_specs import DEFAULT_OPTIMIZER
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE
from shardwise.config.run_config import Config
from shardwise.config.sections import ParallelConfig, Switch, TrainConfig

_ANOTHER_SCHEDULE = f"choose another schedule, such as {DEFAULT_SCHEDULE}"
_NO_EVALUATION_PART = (
    "must leave an evaluation part while train.eval_every is {=train.eval_every}: give it a weight, or set "
    f"train.eval_every=0{see('data#no-evaluation-part')}"
)
_MASKS = "with model.family {=model.family}, which masks tokens"
_MASKS_NONE = "must be left out: model.family {=model.family} predicts the next token and masks none"

_REFUSED: dict[Switch, RuleTable] = {
    "flash_attention_3": {"": ("{precision.mode=float32}, as its kernels take 16-bit numbers",)},
    "update_in_backward": {
        "": ("{optimizer.max_norm}, which needs all gradients first", "{optimizer.offload}", "{hooks.optimizer}"),
        "optimizer.cuts_gradients": ("optimizer.zero ({=optimizer.zero}), which reduces in each micro-batch",),
        "optimizer.spec.needs_whole_tensors": ("optimizer.name ({=optimizer.name}), which updates whole tensors",),
    },
    "cuda_graphs": {
        "": ("{data.reset_attention_mask}", "{data.mixture}", "{precision.matmul}", "{train.bitwise}", "{hooks.loss}"),
        "optimizer.cuts_gradients": ("optimizer.zero ({=optimizer.zero}), which communicates in each pass",),
        "may_have_experts": ("model.family ({=model.family}), which has experts, or may have them",),
        "model.predicts_masked_tokens": ("model.family ({=model.family})",),
    },
}
"""For some of `train.switches`, what they do not go with."""

_RULES: RuleTable = {
    "": (
        "{compile.require_cached} must go with {!compile.enabled} (true)",
        "{compile.enabled} must be false with {hooks.loss}, which is not compiled",
        "{parallel.tensor_overlap=symmetric_memory} must go with {!parallel.sequence} (true): its operators gather and "
        "scatter the sequence",
        "{parallel.tensor_overlap} must be null with {precision.matmul}, whose scales need the whole input before the "
        "first product: leave out one of the two",
        "{parallel.sequence_regather} must be false with {compile.enabled}: the compiler chooses what a compiled block "
        "keeps",
        "{parallel.sequence_regather} must be false with {precision.matmul}, which keeps gathered inputs in one byte "
        "an element: leave it out",
        # A requeued job starts with the same configuration, from a later checkpoint.
        "{train.skip_batches} must be 0 with {checkpoint.resume=auto}: it would count again at each restart; name the "
        "checkpoint before the batches to leave out by checkpoint.resume=STEP",
        "{data.streaming} must be false with {hooks.data}, whose samples have numbers",
        "{evaluation.sets} need {!train.eval_every}, the steps between evaluations",
        "{hooks.optimizer_options} must be left out without {!hooks.optimizer}",
    ),
    "parallel.overlaps": (
        "{compile.enabled} must be false with {parallel.tensor_overlap}, whose layers are not compiled: leave out one "
        "of the two",
    ),
    "passes_keys": (
        "parallel.context_keys (ring) must be gather with {compile.enabled}, whose graphs of a block have no messages "
        "between kernels",
    ),
    "passes_keys model.attention_dropout_p": (
        "parallel.context_keys (ring) must be gather with dropout of attention ({=model.attention_dropout_p}), which "
        "no kernel computes for the keys of a rank",
    ),
    "splits_backward": (
        "{compile.enabled} must be false with parallel.schedule {=parallel.schedule}, which cuts the backward pass of "
        f"a block in two, and that of a compiled block is whole: {_ANOTHER_SCHEDULE}",
        "{parallel.tensor_overlap} must be null with parallel.schedule {=parallel.schedule}, which computes the "
        f"gradients that it overlaps apart from each other: {_ANOTHER_SCHEDULE}",
        "{parallel.sequence_regather} must be false with parallel.schedule {=parallel.schedule}, which computes the "
        f"gradients of inputs and weights apart from each other, and would gather twice: {_ANOTHER_SCHEDULE}",
    ),
    "splits_backward optimizer.cuts_gradients": (
        "{optimizer.reduce=micro_batch} must be step with parallel.schedule {=parallel.schedule}, which splits the "
        "backward pass: leave it out",
        "{optimizer.gather=micro_batch} must be step with parallel.schedule {=parallel.schedule}, which splits the "
        "backward pass: leave it out",
    ),
    "precision.rounds_stochastically": (
        "{optimizer.offload} must be false with precision.rounding stochastic, whose random bits the device draws: "
        "leave it out, or set precision.mode=mixed",
    ),
    "!precision.rounds_stochastically": (
        "{optimizer.offload} must be false with {precision.moments=bfloat16}, which the device rounds by random bits: "
        "leave out one of them",
    ),
    "!precision.rounds_stochastically optimizer.spec.needs_whole_tensors": (
        "{precision.moments=bfloat16} must be left out with optimizer.name {=optimizer.name}, whose update of whole "
        "tensors keeps float32 moments: set optimizer.name=adamw",
    ),
    "!checkpoint.load": (
        "{data.prepend_bos} needs {!data.tokenizer}: one that is trained on the data has no token that begins a text",
    ),
    "!checkpoint.load data.is_streamed": (
        "data.streaming (true) needs {!data.tokenizer}: one is trained on prepared text alone",
    ),
    "data.is_named": (
        "{=data.key} ({=data.name}) must be left out with {hooks.data}, which reads the samples: set it to null",
    ),
    "model.predicts_masked_tokens": (
        "{hooks.data} must be left out with model.family {=model.family}: it is for models that predict the next token",
        "{hooks.loss} must be left out with model.family {=model.family}: it is for models that predict the next token",
    ),
    "model.predicts_masked_tokens data.is_chat": (f"{{=data.key}} ({{=data.name}}) must be text {_MASKS}",),
    "model.predicts_masked_tokens !data.is_chat data.packs_documents": (f"{{data.packing}} must be cut {_MASKS}",),
    # Conversations and packed documents have these keys without a word of the user's.
    "model.predicts_masked_tokens !data.is_chat !data.packs_documents": (
        f"{{data.eod_mask_loss}} must be false {_MASKS}",
        f"{{data.reset_position_ids}} must be false {_MASKS}",
        f"{{data.reset_attention_mask}} must be false {_MASKS}",
    ),
    "!model.predicts_masked_tokens": (f"{{data.max_predictions}} {_MASKS_NONE}",),
    "!model.predicts_masked_tokens data.packs_documents": (
        "{data.packing} must be cut with {hooks.data}, whose samples are rows",
    ),
    "lacks_evaluation_part !data.mixture": (f"data.split ('{{=data.split}}') {_NO_EVALUATION_PART}",),
    "lacks_evaluation_part data.mixture": (f"the split of at least one source of data.mixture {_NO_EVALUATION_PART}",),
    "evaluation.tasks !model.causal": (
        "evaluation.tasks must be left out with model.family {=model.family}: they need a model that predicts the next "
        "token",
    ),
}


def key_problems(config: Config, micro_batches: int | None) -> list[str]:
    """The rules of keys of several sections that a configuration breaks; `micro_batches`: those of a rank a step."""
    problems = broken_rules(_RULES, config)
    for switch in config.train.switches:
        reasons = broken_rules(_REFUSED.get(switch, {}), config)
        drops = {"cuda_graphs": "_dropout", "flash_attention_3": "attention_dropout"}.get(switch, "none")
        keys = dict.fromkeys(key for kind, key in getattr(config.shapes, "keys", {}).items() if kind.endswith(drops))
        reasons += [f"model.{key} ({rate})" for key in keys if (rate := getattr(config.shapes, key))]
        reasons += [config.parallel.keys_text] * (switch == "cuda_graphs" and config.parallel.ranks > 1)
        one_batch = (
            f"train.global_batch ({config.train.global_batch}), a rank's one micro-batch: the last is not replayed"
        )
        reasons += [one_batch] * (switch == "cuda_graphs" and micro_batches == 1)
        problems += [f"train.switches ({switch}) must be left out with {reason}" for reason in reasons]
    hooks = config.hooks
    problems += [
        f"{key} ({path!r}) must read package.module:Name"
        for key, path in hooks.paths.items()
        if not re.fullmatch(PYTHON_NAME, path)
    ]
    optimizer = config.optimizer.name
    if hooks.optimizer is not None and optimizer != DEFAULT_OPTIMIZER:
        problems.append(f"optimizer.name ({optimizer}) must be left out with hooks.optimizer ({hooks.optimizer})")
    resume = config.checkpoint.resume
    if resume != "auto" and resume >= config.train.steps:
        problems.append(
            f"checkpoint.resume ({resume}) must be less than train.steps ({config.train.steps}): name an earlier "
            "checkpoint, or raise train.steps"
        )
    if config.model.predicts_sentences:
        problems += config.data.refused_marks(f"model.family ({config.model.family}), whose pairs have [CLS] and [SEP]")
    return problems + _token_problems(config.data, config.model, config.train.sequence_length)


def _token_problems(data: DataConfig, model: ModelConfig, length: int) -> list[str]:
    problems = []
    if model.predicts_masked_tokens and data.max_predictions is not None and data.max_predictions > length:
        problems.append(
            f"data.max_predictions ({data.max_predictions}) must be at most train.sequence_length ({length})"
        )
    if not model.predicts_masked_tokens and data.masked_fraction != MASKED_FRACTION:
        unused = _MASKS_NONE.replace("{=model.family}", model.family)
        problems.append(f"data.masked_fraction ({data.masked_fraction}) {unused}")
    if model.predicts_masked_tokens or data.eod_token is None:
        return problems
    if not (data.document_options or data.packs_documents or data.append_eod):
        problems.append(
            f"data.eod_token ({data.eod_token}) must be left out unless one of data.eod_mask_loss, "
            "data.reset_position_ids and data.reset_attention_mask is true"
        )
    elif data.eod_token >= model.vocab_size:
        problems.append(f"data.eod_token ({data.eod_token}) must be below model.vocab_size ({model.vocab_size})")
    return problems


# ---- sizes that tensor and context parallelism cut, and those that fp8 products take


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
        "parallel.context_grain ({=parallel.sequence_parts}) must be 1 with train.bitwise (true) and model.family "
        "{=model.family}, whose experts take the tokens of all parts of a sequence at once",
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
    )
}
_RULES_WITHOUT_BIAS: RuleTable = {
    "optimizer.chooses_bias_rate": (
        "{optimizer.router_bias_rate} must be left out with model.family {=model.family}, whose routers have no "
        "correction bias: set optimizer.router_batch_loss to balance experts",
    )
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
    has_bias = model.is_own or (routing is not None and routing.has_bias)
    problems = [] if has_bias else broken_rules(_RULES_WITHOUT_BIAS, config)
    if routing is None:
        none = f"parallel.expert ({expert}) must be 1 with model.family {model.family}, which has no experts"
        return problems + ([none] if expert > 1 else []) + broken_rules(_RULES_WITHOUT_EXPERTS, config)
    ranks = layout.replicas // config.parallel.replicate
    near = listing(nearest_numbers(expert, divisors(math.gcd(ranks, routing.experts))), "or")
    if routing.experts % expert:
        problems.append(
            f"parallel.expert ({expert}) must divide the experts of a block ({routing.experts}): nearest {near}"
        )
    elif ranks % expert:
        problems.append(
            f"parallel.expert ({expert}) must divide the data-parallel degree × parallel.context / parallel.replicate "
            f"({layout.data} × {layout.context} / {config.parallel.replicate}): nearest {near}"
        )
    if routing.scores == "sigmoid":
        problems += broken_rules(_RULES_OF_SIGMOIDS, config)
    return problems + broken_rules(_RULES_OF_EXPERTS, config)


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
    if model.is_own or model.any_routing is None or model.expert_width == model.intermediate_size:
        return None
    return model.expert_width
