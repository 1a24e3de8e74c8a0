"""Bytes that one rank needs at its peak, and bytes of the weights that a run leaves on disk.

Legend: S sequence length, B micro batch, T = S·B tokens, H hidden size, F intermediate size, V vocabulary, L blocks,
h heads, q = h · head_dim, kv = key/value heads · head_dim, t tensor-parallel degree, s = t under sequence parallelism,
else 1, d data-parallel degree, a bytes of an activation (those of a parameter).
"""

from dataclasses import dataclass, fields

from shardwise.config import Config, Layout
from shardwise.cost.buckets import bucket_shapes, padded_elements
from shardwise.cost.params import DTYPE_BYTES, LocalWidths, parameter_count

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
        optimizer: AdamW's two moments, and a master where the optimizer's dtype is not the parameters'; 1/d with ZeRO.
        activations: what the backward pass of one micro-batch keeps.
        loss: the head's live weight gradient, the gradient of its input, and one chunk of logits.
        buffers: rotary tables, and what the backward pass works in or the reduction sends from, as far as it does not
        fit into memory that others have left by then.
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


def expected_memory(config: Config, layout: Layout, accelerator: bool = False) -> MemoryEstimate:
    """Peak bytes per rank of training `config` without recompute, eagerly executed."""
    precision = config.precision.resolved(accelerator)
    elements = padded_elements(config, layout, accelerator)
    shard = elements // layout.data if config.optimizer.zero else elements
    moments_and_master = 2 if precision.parameter == precision.optimizer else 3
    activations, loss = _activations(config, layout, accelerator), _loss(config, layout, accelerator)
    return MemoryEstimate(
        parameters=elements * DTYPE_BYTES[precision.parameter],
        gradients=elements * DTYPE_BYTES[precision.gradient],
        optimizer=moments_and_master * shard * DTYPE_BYTES[precision.optimizer],
        activations=activations,
        loss=loss,
        buffers=_rotary_tables(config, accelerator)
        + max(
            _backward_working_set(config, layout, accelerator) - loss,
            _reduction(config, layout, accelerator) - activations - loss,
            0,
        ),
    )


def loss_chunk_elements(rows: int, accelerator: bool) -> int:
    """Logits that the chunked loss holds at once, where a rank has `rows` of the head."""
    limit = LOSS_CHUNK_ELEMENTS_ACCELERATOR if accelerator else LOSS_CHUNK_ELEMENTS_CPU
    return max(limit, LOSS_CHUNK_TOKENS * rows)


def final_weights_bytes(config: Config, accelerator: bool = False) -> int:
    """Disk that the final Hugging Face folder's weights take, in the dtype that the model computes in."""
    return parameter_count(config.model) * DTYPE_BYTES[config.precision.resolved(accelerator).parameter]


def _activations(config: Config, layout: Layout, accelerator: bool) -> int:
    """What autograd saves of one micro-batch: L blocks, and the final norm with its output.

    A block's terms, in order:

    | saved                                         | elements            |
    |-----------------------------------------------|---------------------|
    | input of the attention norm, its 1/rms        | T·H/s, T/s float32  |
    | input of QKV (gathered, or the norm's output) | T·H                 |
    | QKV output: the values are a view of it       | T·(q + 2kv)/t       |
    | queries and keys after rotation               | T·(q + kv)/t        |
    | attention output, which is o_proj's input     | T·q/t               |
    | its log-sum-exp                               | T·h/t float32       |
    | input of the MLP norm, its 1/rms              | T·H/s, T/s float32  |
    | input of gate and up                          | T·H                 |
    | gate and up                                   | T·2F/t              |
    | silu(gate)                                    | T·F/t               |
    | silu(gate)·up, which is down_proj's input     | T·F/t               |

    RMSNorm saves its input as it is. In bfloat16 on a CPU it is made of single operations that save its input and the
    normalised input, both in float32. A key/value projection that is replicated beyond its heads has kv/t = head_dim.
    """
    model, dtype = config.model, config.precision.resolved(accelerator).parameter
    local, a = LocalWidths.of(model, layout.tensor), DTYPE_BYTES[dtype]
    tokens = config.train.sequence_length * config.train.micro_batch
    tokens_between = tokens // (layout.tensor if layout.sequence else 1)
    norm = tokens_between * (model.hidden_size * (a if accelerator or a == _FLOAT32 else 2 * _FLOAT32) + _FLOAT32)
    heads = model.num_attention_heads // layout.tensor
    attention = model.hidden_size + (local.query + 2 * local.key_value) + (local.query + local.key_value) + local.query
    mlp = model.hidden_size + 4 * local.intermediate
    block = 2 * norm + tokens * (a * (attention + mlp) + _FLOAT32 * heads)
    return model.num_hidden_layers * block + norm + a * tokens_between * model.hidden_size


def _loss(config: Config, layout: Layout, accelerator: bool) -> int:
    """Head and loss: dW in float32 [V/t, H], dx [T/s, H], and a chunk's logits and gathered input with its gradient.

    A chunk's logits are float32; in bfloat16 the matrix product's own output and the gradient handed to the next one
    stand beside them.
    """
    a = DTYPE_BYTES[config.precision.resolved(accelerator).parameter]
    hidden, rows = config.model.hidden_size, LocalWidths.of(config.model, layout.tensor).vocabulary
    tokens = config.train.sequence_length * config.train.micro_batch
    limit = loss_chunk_elements(rows, accelerator)
    tokens_a_row = config.train.micro_batch * (layout.tensor if layout.sequence else 1)
    chunk = min(tokens, max(1, limit // (rows * tokens_a_row)) * tokens_a_row)
    per_logit = _FLOAT32 if a == _FLOAT32 else _FLOAT32 + 2 * a
    input_gradient = a * tokens // (layout.tensor if layout.sequence else 1) * hidden
    return _FLOAT32 * rows * hidden + input_gradient + chunk * (rows * per_logit + 2 * a * hidden)


def _rotary_tables(config: Config, accelerator: bool) -> int:
    """Cosines and sines, [S, head_dim / 2] each."""
    dtype = config.precision.resolved(accelerator).parameter
    return DTYPE_BYTES[dtype] * config.train.sequence_length * config.model.head_dim


def _backward_working_set(config: Config, layout: Layout, accelerator: bool) -> int:
    """What a block's backward pass holds beyond what was saved; the loss's memory is free by then.

    The largest weight's gradient before it is added up, the gradient of the MLP's input, and those of gate and up,
    apart and joined, less what was saved for them and is free by then: T·(H + 2F/t).
    """
    model, local = config.model, LocalWidths.of(config.model, layout.tensor)
    tokens = config.train.sequence_length * config.train.micro_batch
    largest = max(local.vocabulary, 2 * local.intermediate, local.query + 2 * local.key_value) * model.hidden_size
    elements = largest + tokens * (2 * local.intermediate + model.hidden_size)
    return DTYPE_BYTES[config.precision.resolved(accelerator).parameter] * elements


def _reduction(config: Config, layout: Layout, accelerator: bool) -> int:
    """Copies of gradients on their way over data parallelism; activations and loss are free by then.

    Two neighbouring buckets may be under way at once. A copy is made where gradients are reduced in another dtype, and
    on a CPU one for the slices that arrive, which are summed there.
    """
    precision = config.precision.resolved(accelerator)
    if layout.data == 1:
        return 0
    sizes = [bucket.elements for bucket in bucket_shapes(config, layout, accelerator)]
    under_way = max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
    copies = int(precision.reduce != precision.gradient) + int(not accelerator and config.optimizer.zero == 1)
    return copies * under_way * DTYPE_BYTES[precision.reduce]
