"""Bytes that one rank needs at its peak, and bytes of a checkpoint on disk.

Legend: see `cost/case.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardwise.config import DTYPE_BYTES, BertConfig, Config, Layout
from shardwise.config.sections import SINGLE_STAGE
from shardwise.cost.activations import (
    DropoutMasks,
    block_activations,
    block_stack,
    invariant_masks,
    norm_bytes,
    waiting_bytes,
)
from shardwise.cost.buckets import bucket_shapes
from shardwise.cost.case import Case
from shardwise.cost.flight import Pass, Peak, peak
from shardwise.plan.chunks import loss_chunk_elements
from shardwise.plan.order import action_order, in_one_pass
from shardwise.plan.parameters import parameter_count
from shardwise.plan.stage import Stage, rank_of

_FLOAT32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a training step, by kind.

    What the process holds before the model is built (interpreter, torch, a device's context) is not part of it.

    Attributes:
        parameters: the local shards, with the padding of the vocabulary and of the flat buckets they lie in.
        gradients: one for each of these elements, in the gradient dtype.
        optimizer: AdamW's or LAMB's two moments, and a master where the optimizer's dtype is not the parameters'; 1/d
        with ZeRO.
        activations: what micro-batches keep for their backward pass: one, or in a pipeline as many as are under way.
        loss: the head's live weight gradient, the gradient of its input, and one chunk of logits.
        buffers: rotary tables, and what the backward pass computes again and works in, or the reduction sends from, as
        far as it does not fit into memory that others have left by then.
        pipeline: what is received from other stages, for all micro-batches of a step, and what is sent to them.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    buffers: int
    pipeline: int = 0

    @property
    def total(self) -> int:
        return sum(size for _, size in self.rows())

    def rows(self) -> list[tuple[str, int]]:
        """(kind, bytes), in the order in which they are shown; `pipeline` only where there is one."""
        found = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(kind, size) for kind, size in found if size or kind != "pipeline"]


def expected_memory(
    config: Config, layout: Layout, accelerator: bool = False, *, pipeline_rank: int | None = None
) -> MemoryEstimate | None:
    """Peak bytes per rank of training `config`, eagerly executed. None for a model of your own.

    pipeline_rank: whose; None: of the one that needs most.
    """
    if pipeline_rank is None:
        pipeline_rank = neediest_rank(config, layout, accelerator)
    by_rank = memory_by_rank(config, layout, accelerator)
    return None if by_rank is None else by_rank[pipeline_rank]


def neediest_rank(config: Config, layout: Layout, accelerator: bool = False) -> int:
    """The pipeline rank that needs most memory, the first of several; 0 for a model of your own."""
    by_rank = memory_by_rank(config, layout, accelerator) or []
    return max(range(len(by_rank)), key=lambda rank: by_rank[rank].total, default=0)


def memory_by_rank(config: Config, layout: Layout, accelerator: bool = False) -> list[MemoryEstimate] | None:
    """Peak bytes of each pipeline rank. None for a model of your own."""
    return [_memory(case) for case in Case.of_ranks(config, layout, accelerator)] or None


def _memory(case: Case) -> MemoryEstimate:
    elements = sum(bucket.elements for bucket in bucket_shapes(case))
    shard = elements // case.layout.data if case.config.optimizer.zero else elements
    moments_and_master = 2 if case.precision.parameter == case.precision.optimizer else 3
    step = _step_peak(case)
    return MemoryEstimate(
        parameters=elements * DTYPE_BYTES[case.precision.parameter],
        gradients=elements * DTYPE_BYTES[case.precision.gradient],
        optimizer=moments_and_master * shard * DTYPE_BYTES[case.precision.optimizer],
        activations=step.activations,
        loss=step.forward - step.activations,
        buffers=_rotary_tables(case) + step.whole - step.forward,
        pipeline=_received(case) + step.sent,
    )


def _step_peak(case: Case) -> Peak:
    order = action_order(case.config.parallel, case.micro_batches, case.pipeline_rank)
    if case.config.train.recompute == "full":
        order = in_one_pass(order)
    reduction = _reduction(case)
    return peak(order, {stage.index: _pass(case, stage, reduction) for stage in case.stages}, case.micro_batches)


def _pass(case: Case, stage: Stage, reduction: int) -> Pass:
    """What the embedding saves, the blocks, and the last norm; and the loss.

    A stage's input is what it received, [T/s, H], which does not count here. Its output is held until the backward
    pass; where a rank has several stages it counts as sent (`_sent`). A tied head's gradient waits for the
    embedding's where both are in one stage.
    """
    blocks = block_stack(case, stage.layers)
    embedding = _embedding_activations(case) if stage.is_first else 0
    last = _last_activations(case) if stage.is_last else 0
    kept = blocks.kept + embedding + last + _document_tables(case)
    keeps_input = block_activations(case, stage.layers[0]).saves_input or case.config.train.recompute == "full"
    received = _boundary(case) if keeps_input and not stage.is_first else 0
    if not stage.is_last and case.config.parallel.schedule in SINGLE_STAGE:
        kept += _boundary(case)
    table = case.a * case.local.vocabulary * case.model.hidden_size
    head = table if stage.is_first and stage.is_last and case.model.tie_word_embeddings else 0
    return Pass(
        kept=kept - received,
        loss=_loss(case) if stage.is_last else 0,
        loss_kept=_loss_gradients(case) if stage.is_last else 0,
        backward=blocks.peak + embedding + head - received,
        last=_embedding_gradient(case) + head if stage.is_first else 0,
        waiting=len(stage.layers) * waiting_bytes(case),
        reduction=reduction,
        **_sent(case, stage),
    )


def _boundary(case: Case) -> int:
    """x, [T/s, H], as it goes from stage to stage."""
    return case.a * case.tokens_between * case.model.hidden_size


def _received(case: Case) -> int:
    """Of each micro-batch of a step, [T/s, H]: x for each stage but the first, the gradient of x for each but the last.

    They have memory of their own for as long as the run lives.
    """
    if case.layout.pipeline == 1:
        return 0
    each = sum((not stage.is_first) + (not stage.is_last) for stage in case.stages)
    return each * case.micro_batches * _boundary(case)


def _sent(case: Case, stage: Stage) -> dict[str, int]:
    """What stays until the end of the step, as all does that a rank with several stages sends."""
    parallel = case.config.parallel
    if case.layout.pipeline == 1 or parallel.schedule in SINGLE_STAGE:
        return {}
    onwards, back = (rank_of(parallel, stage.index + step) != stage.rank for step in (1, -1))
    return {
        "onwards": _boundary(case) * (onwards and not stage.is_last),
        "back": _boundary(case) * (back and not stage.is_first),
    }


def invariant_dropout(
    config: Config, layout: Layout, accelerator: bool = False, *, pipeline_rank: int = 0
) -> DropoutMasks | None:
    """What layout-invariant masks cost one rank. None where there are none, and for a model of your own."""
    case = Case.of(config, layout, accelerator, pipeline_rank)
    drops = config.train.dropout_mode == "invariant" and config.model.has_dropout
    return invariant_masks(case, _step_peak(case).in_flight) if case is not None and drops else None


def checkpoint_bytes(config: Config, accelerator: bool = False) -> int | None:
    """Disk that one checkpoint takes: weights in the dtype that the model computes in, moments, and masters if any.

    Every element once, whatever the layout, without padding. None for a model of your own.
    """
    parameters = parameter_count(config.model)
    if parameters is None:
        return None
    precision = config.precision.resolved(accelerator)
    moments_and_master = 2 if precision.parameter == precision.optimizer else 3
    return parameters * (DTYPE_BYTES[precision.parameter] + moments_and_master * DTYPE_BYTES[precision.optimizer])


def _embedding_activations(case: Case) -> int:
    """What the embedding saves: the mask of its dropout, one byte each, and BERT's norm."""
    mask = case.tokens_between * case.model.hidden_size if case.model.embedding_dropout_p else 0
    return mask + (norm_bytes(case) if isinstance(case.model, BertConfig) else 0)


def _last_activations(case: Case) -> int:
    """What the blocks' output is while the loss is made: the last norm with its output, or BERT's x, gathered."""
    if isinstance(case.model, BertConfig):
        return case.a * case.tokens * case.model.hidden_size
    return norm_bytes(case) + case.a * case.tokens_between * case.model.hidden_size


def _document_tables(case: Case) -> int:
    """What all blocks of a stage share where documents end within a sample.

    The mask that is added to the scores, [B, S, S], and the cosines and sines of each token's own position, [T·r].

    Attention that goes step by step keeps no mask that is added, unless recompute will need it again.
    """
    data, train, model = case.config.data, case.config.train, case.model
    masked = data.reset_attention_mask and not (case.attends_step_by_step and train.recompute == "none")
    mask = train.micro_batch * train.sequence_length**2 if masked else 0
    turns = case.tokens * model.rotary_dim if data.reset_position_ids else 0
    return case.a * (mask + turns)


def _loss(case: Case) -> int:
    """Head and loss: dW in float32 [V/t, H], the gradient of their input, and one chunk.

    A chunk has its logits in float32, in bfloat16 with what the matrix product returned, or with the gradient that goes
    to the next two, beside them; its input [C, H]; and its part of dW [V/t, H], or the gradient of its input. BERT's
    masked-token head takes P·B rows, and keeps the input of its transform, of its activation and of its norm, and the
    output of that.
    """
    a, rows, hidden = case.a, case.local.vocabulary, case.model.hidden_size
    limit = loss_chunk_elements(rows, case.accelerator)
    is_bert = isinstance(case.model, BertConfig)
    scattered = case.layout.sequence and not is_bert
    tokens_a_row = case.config.train.micro_batch * (case.layout.tensor if scattered else 1)
    chunk = min(case.predicted, max(1, limit // (rows * tokens_a_row)) * tokens_a_row)
    per_logit = _FLOAT32 if a == _FLOAT32 else _FLOAT32 + a
    head = 4 * a * hidden * case.predicted if is_bert else 0
    products = a * hidden * (chunk + max(rows, chunk))
    return _loss_gradients(case) + chunk * rows * per_logit + products + head


def _loss_gradients(case: Case) -> int:
    """dW in float32, [V/t, H], and the gradient of the head's input, which the loss makes in its forward pass."""
    tokens = case.predicted if isinstance(case.model, BertConfig) else case.tokens_between
    return (_FLOAT32 * case.local.vocabulary + case.a * tokens) * case.model.hidden_size


def _rotary_tables(case: Case) -> int:
    """Cosines and sines, [S, rotary dimensions / 2] each, of each stage with a block that rotates."""
    stages = sum(any(case.model.rotates(layer) for layer in stage.layers) for stage in case.stages)
    return stages * case.a * case.config.train.sequence_length * case.model.rotary_dim


def _embedding_gradient(case: Case) -> int:
    """The gradient of the embedding's output, and its own before it is added up; activations and loss are free by
    then."""
    hidden = case.model.hidden_size
    return case.a * case.tokens * hidden + case.gradient_bytes(case.local.vocabulary * hidden)


def _reduction(case: Case) -> int:
    """Copies of gradients on their way over data parallelism; activations and loss are free by then.

    Two neighbouring buckets may be under way at once. A copy is made where gradients are reduced in another dtype, and
    on a CPU one for the slices that arrive, which are summed there.
    """
    precision = case.precision
    if case.layout.data == 1:
        return 0
    sizes = [bucket.elements for bucket in bucket_shapes(case)]
    under_way = max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
    sums_slices = not case.accelerator and case.config.optimizer.zero == 1
    copies = int(precision.reduce != precision.gradient) + int(sums_slices)
    return copies * under_way * DTYPE_BYTES[precision.reduce]
