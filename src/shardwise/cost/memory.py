"""Bytes that one rank needs at its peak, and bytes of a checkpoint on disk.

Legend: see `cost/case.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardwise.config import BertConfig, Config, Layout, LlamaConfig
from shardwise.cost.activations import DropoutMasks, block_stack, invariant_masks, layer_norm_bytes, rms_norm_bytes
from shardwise.cost.buckets import bucket_shapes
from shardwise.cost.case import Case
from shardwise.cost.params import DTYPE_BYTES, parameter_count

LOSS_CHUNK_ELEMENTS_CPU = 2**21
"""Logits that the chunked loss holds at once on a CPU: 8 MiB, about what its caches keep."""
LOSS_CHUNK_ELEMENTS_ACCELERATOR = 2**27
"""Logits held at once on an accelerator: 512 MiB, large enough that its matrix products stay at full rate."""

LOSS_CHUNK_TOKENS = 256
"""Tokens of a chunk at least: each chunk adds to the whole weight gradient once, which fewer would not pay for."""

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
        activations: what one micro-batch keeps for its backward pass.
        loss: the head's live weight gradient, the gradient of its input, and one chunk of logits.
        buffers: rotary tables, and what the backward pass computes again and works in, or the reduction sends from, as
        far as it does not fit into memory that others have left by then.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(size for _, size in self.rows())

    def rows(self) -> list[tuple[str, int]]:
        """(kind, bytes), in the order in which they are shown."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def expected_memory(config: Config, layout: Layout, accelerator: bool = False) -> MemoryEstimate | None:
    """Peak bytes per rank of training `config`, eagerly executed. None for a model of your own."""
    case = Case.of(config, layout, accelerator)
    if case is None:
        return None
    elements = sum(bucket.elements for bucket in bucket_shapes(case))
    shard = elements // layout.data if config.optimizer.zero else elements
    moments_and_master = 2 if case.precision.parameter == case.precision.optimizer else 3
    blocks, loss = block_stack(case), _loss(case)
    embedding, last = _embedding_activations(case), _last_activations(case)
    activations = blocks.kept + embedding + last
    table = case.a * case.local.vocabulary * case.model.hidden_size
    head = table if case.model.tie_word_embeddings else 0  # its gradient waits for the embedding's
    later = max(blocks.peak + embedding + head, _embedding_gradient(case) + head, _reduction(case))
    return MemoryEstimate(
        parameters=elements * DTYPE_BYTES[case.precision.parameter],
        gradients=elements * DTYPE_BYTES[case.precision.gradient],
        optimizer=moments_and_master * shard * DTYPE_BYTES[case.precision.optimizer],
        activations=activations,
        loss=loss,
        buffers=_rotary_tables(case) + max(later - activations - loss, 0),
    )


def invariant_dropout(config: Config, layout: Layout, accelerator: bool = False) -> DropoutMasks | None:
    """What layout-invariant masks cost one rank. None where there are none, and for a model of your own."""
    case = Case.of(config, layout, accelerator)
    drops = config.train.dropout_mode == "invariant" and config.model.has_dropout
    return invariant_masks(case) if case is not None and drops else None


def loss_chunk_elements(rows: int, accelerator: bool) -> int:
    """Logits that the chunked loss holds at once, where a rank has `rows` of the head."""
    limit = LOSS_CHUNK_ELEMENTS_ACCELERATOR if accelerator else LOSS_CHUNK_ELEMENTS_CPU
    return max(limit, LOSS_CHUNK_TOKENS * rows)


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
    return mask + (layer_norm_bytes(case) if isinstance(case.model, BertConfig) else 0)


def _last_activations(case: Case) -> int:
    """What the blocks' output is while the loss is made: the last norm with its output, or BERT's x, gathered."""
    match case.model:
        case BertConfig():
            return case.a * case.tokens * case.model.hidden_size
        case LlamaConfig():
            norm = rms_norm_bytes(case)
        case _:
            norm = layer_norm_bytes(case)
    return norm + case.a * case.tokens_between * case.model.hidden_size


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
    gradient = a * hidden * (case.tokens_between if not is_bert else case.predicted)
    head = 4 * a * hidden * case.predicted if is_bert else 0
    products = a * hidden * (chunk + max(rows, chunk))
    return _FLOAT32 * rows * hidden + gradient + chunk * rows * per_logit + products + head


def _rotary_tables(case: Case) -> int:
    """Cosines and sines, [S, rotary dimensions / 2] each."""
    return case.a * case.config.train.sequence_length * case.model.rotary_dim


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
