"""Rules of keys of several sections that must not go together, whatever the number of ranks (`config/rule.py`)."""

from __future__ import annotations

import re

from shardwise.base.errors import see
from shardwise.config.base_section import RuleTable, broken
from shardwise.config.data import MASKED_FRACTION, PYTHON_NAME, DataConfig
from shardwise.config.model import ModelConfig
from shardwise.config.optimizers import DEFAULT_OPTIMIZER
from shardwise.config.pipeline_schedules import DEFAULT_SCHEDULE
from shardwise.config.run_config import Config

_ANOTHER_SCHEDULE = f"choose another schedule, such as {DEFAULT_SCHEDULE}"
_NO_EVALUATION_PART = (
    "must leave an evaluation part while train.eval_every is {=train.eval_every}: give it a weight, or set "
    f"train.eval_every=0{see('data#no-evaluation-part')}"
)
_MASKS = "with model.family {=model.family}, which masks tokens"
_MASKS_NONE = "must be left out: model.family {=model.family} predicts the next token and masks none"

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
    "model.is_own": ("{hooks.loss} must be left out with model.family {=model.family}, whose forward gives the loss",),
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


def key_problems(config: Config) -> list[str]:
    """The rules of keys of several sections that a configuration breaks."""
    problems = broken(_RULES, config)
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
    """Refuse ids and numbers of tokens that the model or the samples do not have."""
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
    if not data.document_options and not data.packs_documents:
        problems.append(
            f"data.eod_token ({data.eod_token}) must be left out unless one of data.eod_mask_loss, "
            "data.reset_position_ids and data.reset_attention_mask is true"
        )
    elif data.eod_token >= model.vocab_size:
        problems.append(f"data.eod_token ({data.eod_token}) must be below model.vocab_size ({model.vocab_size})")
    return problems
