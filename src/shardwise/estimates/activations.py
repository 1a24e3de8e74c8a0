"""Bytes that the blocks keep for the backward pass, with and without recompute, and what they hold at their peak.

Legend: see `estimates/rank_workload.py`. What stands in brackets is a tensor's number of elements, of `a` bytes each
where the text does not give their dtype. As arXiv:2205.05198, section 4, these formulas count the tensors that autograd
saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from shardwise.estimates.feed_forward import FeedForwardBytes, feed_forward_bytes
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.layers.chunks import MASK_CHUNK_ELEMENTS

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class _BlockActivations:
    """Bytes that autograd saves in one block. The attention core is `softmax(q kᵀ) v`."""

    saves_input: bool  # True if the block's input x, [T/s, H], is one of the tensors counted below
    attention: int  # saved around the core, by its norm, the QKV and output projections and dropout
    core_input: int  # tensors that hold q, k and v as the core receives them
    # The part of `core_input` that the core saves; of the rest it saves copies, counted in `core`.
    core_input_saved: int
    core: int  # saved inside the core
    mlp: int  # saved by the MLP with its norm and dropout
    normed: int  # the part of `attention`, and as much of `mlp`, that a norm computes again of what it keeps
    rotated: int  # the part of `core_input` that rotation computes again of the rest
    activated: int  # the part of `mlp` that the activation computes again of what it keeps

    @property
    def saved(self) -> int:
        """All that the block saves without recompute."""
        return self.attention + self.core_input_saved + self.core + self.mlp


@dataclass(frozen=True)
class BlockStack:
    """Bytes of activations of several blocks for one micro-batch."""

    kept: int  # at the end of the forward pass
    peak: int  # the most during the backward pass, with the gradients that it works with
    # Likewise while the gradients of the last block's experts are complete (`FeedForwardBytes.is_early`).
    early: int = 0
    later: int = 0  # likewise from the moment at which another gradient of a weight of the last block is complete


def activation_stack(workload: RankWorkload, layers: Iterable[int]) -> list[BlockStack]:
    """Estimate, for each block, the activations that the blocks up to it keep, and the most in its backward pass.

    | recompute | kept                                      | computed again, one block at a time |
    |-----------|-------------------------------------------|-------------------------------------|
    | none      | L blocks                                  |                                     |
    | selective | L blocks without cheap results            | each result when it is needed       |
    |           | and the inside of a core step by step     | the inside of the core              |
    | full      | L inputs                                  | the block, beside its input         |

    The backward pass goes from the last block to the first. When it is at a block, all that later blocks kept is free.
    """
    blocks = []
    kept = 0
    for layer in layers:
        first_alike = workload.first_alike[layer]
        block_kept, work = activation_bytes(workload, first_alike)
        kept += block_kept
        feed = feed_forward_bytes(workload, layer)
        early = later = work
        if feed.is_early and workload.recompute == "none":
            # They are complete when what the layer saved is free, and the rows at work are too.
            block = block_activations(workload, first_alike)
            early = _mlp_gradients(workload, feed) - feed.at_work + workload.gathered_bytes - block.mlp
            weight = workload.model.hidden_size * (workload.local.query + 2 * workload.local.key_value)
            qkv = workload.x_bytes + workload.gathered_bytes + workload.weight_gradient(weight)
            later = max(_core_gradients(workload), qkv - block.core_input_saved - block.core) - block.mlp
        blocks.append(BlockStack(kept, kept + work, kept + early, kept + later))
    return blocks


@lru_cache(maxsize=256)
def activation_bytes(workload: RankWorkload, layer: int) -> tuple[int, int]:
    """Estimate the bytes that one block keeps, and the most that its backward pass holds in addition.

    A backward pass begins with the MLP. What the MLP saved is free when the core's backward pass begins.
    """
    block = block_activations(workload, layer)
    x = workload.x_bytes
    query = workload.a * workload.tokens * workload.local.query
    feed = feed_forward_bytes(workload, layer)
    mlp = _mlp_gradients(workload, feed)
    core = _core_gradients(workload)
    core_mask, hidden_mask = _mask_hashing(workload)
    match workload.recompute:
        case "none":
            return block.saved, max(mlp, core - block.mlp, core_mask - block.mlp, hidden_mask)
        case "selective":
            kept_mlp = block.mlp - block.normed - block.activated
            kept_attention = block.attention - block.normed - block.rotated
            mlp += block.activated
            core += block.rotated
            if workload.attends_step_by_step:
                core = block.core + max(core, core_mask + x + query)
                return kept_attention + block.core_input + kept_mlp, max(mlp, core - kept_mlp, hidden_mask)
            kept = kept_attention + block.core_input_saved + block.core + kept_mlp
            return kept, max(mlp, core - kept_mlp, hidden_mask)
        case "full":
            recomputed = block.saved - (x if block.saves_input else 0)
            x += feed.recorded
            return x, recomputed + max(mlp, core - block.mlp, core_mask + x - block.mlp, hidden_mask + x)


def block_activations(workload: RankWorkload, layer: int) -> _BlockActivations:
    """Estimate the bytes of activations that a block saves.

    | part      | saved                                                | elements          |
    |-----------|------------------------------------------------------|-------------------|
    | attention | input of QKV, gathered unless it is gathered again   | T·H or T/s·H      |
    |           | attention output, the output projection's input      | T·q/t             |
    |           | norms of q and k: statistics                         | see `_head_norms` |
    |           | mask of dropout on what is added to x, one byte each | T·H/s             |
    | core      | q, k and v, and what the core saves beside them      | see `_core`       |
    | MLP       | see `FeedForwardBytes.saved`                         |                   |
    | both      | the norm: its input and one or two statistics        | see `norm_bytes`  |

    With `precision.matmul` fp8 the inputs of the four linear layers are rounded copies, of one byte an element or, by
    parts, of `a`: a core that saves its output saves it beside the copy, and so does ReLU.

    If norms come first, x is the input of the first norm. If they come last (BERT, OLMo 2), x is the input of QKV,
    unless it had to be gathered. Both norms of a parallel residual have the same input, which counts once. ReLU saves
    its output in place of its input: without dropout behind it, that is the last layer's input.
    """
    model = workload.model
    local = workload.local
    a = workload.a
    rounds = workload.rounds_inputs
    attended = workload.tokens * local.query
    feed = feed_forward_bytes(workload, layer)
    attention = (
        workload.product_input_bytes
        + workload.input_width * attended
        + (a * attended if rounds and not workload.attends_step_by_step else 0)
        + workload.mask_elements
        + _head_norms(workload)
    )
    # Copies take the place of what rotation made, and of QKV's output unless a norm keeps it. Else it works in place.
    is_copied = any((model.query_key_norm, model.interleaved_heads, workload.has_parts, workload.gathers_keys))
    is_rotated = model.rotates(layer) and (workload.config.compile.enabled or is_copied) and not workload.copies_heads
    core_input, core_input_saved, core = _core(workload, layer, copied=is_rotated or model.query_key_norm is not None)
    if model.norms_input:
        saves_input = model.norm_kind == "layer_norm" or workload.accelerator or a == _FLOAT32
        saves_input = saves_input and not _norms_in_float32(workload)
    else:
        saves_input = (not workload.layout.sequence_parallel or workload.config.regathers) and not rounds
    norms = norm_bytes(workload) * (2 if model.norm_place == "both" else 1)
    rotated_keys = 0 if workload.gathers_keys else local.key_value  # gathered ones are kept as before rotation
    return _BlockActivations(
        saves_input=saves_input,
        attention=attention + norms,
        core_input=core_input,
        core_input_saved=core_input_saved,
        core=core,
        mlp=feed.saved + norms - (workload.x_bytes if model.parallel_residual else 0),
        normed=_normed(workload),
        rotated=(is_rotated and model.query_key_norm is None) * a * workload.tokens * (local.query + rotated_keys),
        activated=feed.activated,
    )


def _normed(workload: RankWorkload) -> int:
    """Return the bytes of a norm's output that a matmul keeps and that are computed again of what the norm keeps.

    A gathered or rounded input is no output of a norm. A norm that keeps a float32 copy does not keep its input, of the
    same size.
    """
    is_gathered = workload.layout.sequence_parallel and not workload.config.regathers
    is_copy = is_gathered or workload.rounds_inputs
    if not workload.model.norms_input or is_copy or _norms_copy_input(workload):
        return 0
    return workload.x_bytes


def split_backward_bytes(workload: RankWorkload) -> int:
    """Estimate the bytes that a block holds between the halves of a split backward pass, more than it keeps.

    The first half computes the gradient of the block's input. The second half computes the gradients of the weights,
    and needs for each matrix product and norm the gradient of its output: of QKV, [T·(q + 2kv)/t], of q and k if these
    have norms, [T·(q + kv)/t], of the output of attention, [T·H], of its norm, [T/s·H], and those of the MLP
    (`_waiting_mlp`). With selective recompute, the inside of the core is held too.
    """
    local = workload.local
    normed = local.query + local.key_value if workload.model.query_key_norm else 0
    attention = (
        workload.a * workload.tokens * (local.query + 2 * local.key_value + normed)
        + workload.gathered_bytes
        + workload.x_bytes
    )
    return attention + _waiting_mlp(workload) + _core_again(workload)


def split_backward_peak(workload: RankWorkload, blocks: int) -> int:
    """Estimate the most that so many blocks hold in the first half of a split backward pass, beside what they keep.

    This half frees nothing that was kept. It ends at the core of the first block: the other blocks wait, and so does
    the MLP of this one. Beside them are the gradients of x, [T/s, H], of the values, [T·q/t], and in a core that goes
    step by step those of P before and after dropout. With full recompute, a backward pass is not split.
    """
    if workload.recompute == "full":
        return 0
    matrices = 2 * workload.a * workload.probabilities if workload.attends_step_by_step else 0
    core = workload.x_bytes + workload.a * workload.tokens * workload.local.query + matrices + _core_again(workload)
    return (blocks - 1) * split_backward_bytes(workload) + _waiting_mlp(workload) + core


def _waiting_mlp(workload: RankWorkload) -> int:
    """Return waiting gradients of the MLP: first layer, [T·F/t] (gated: twice), output, [T·H], and norm, [T/s·H]."""
    first = (2 if workload.model.gated else 1) * workload.local.intermediate
    return workload.a * workload.tokens * first + workload.gathered_bytes + workload.x_bytes


def _core_again(workload: RankWorkload) -> int:
    """Return the bytes of the inside of a core step by step as selective recompute computes it again."""
    if workload.recompute != "selective" or not workload.attends_step_by_step:
        return 0
    return block_activations(workload, workload.stages[0].layers[0]).core


def norm_bytes(workload: RankWorkload) -> int:
    """Estimate the bytes that a norm on the residual stream saves.

    LayerNorm saves its input, the mean and 1/deviation; on an accelerator the latter two are in float32. RMSNorm saves
    its input, and 1/rms in float32. In bfloat16 on a CPU, RMSNorm consists of single operations, which save the input
    and the normalised input, both in float32. A norm with an offset saves 1 + weight, [H], and its input in float32.
    """
    if workload.model.norm_kind == "layer_norm":
        return workload.x_bytes + 2 * workload.tokens_between * (_FLOAT32 if workload.accelerator else workload.a)
    saved = workload.x_bytes
    if _norms_copy_input(workload):
        saved = (2 if _norms_by_operations(workload) else 1) * _FLOAT32 * workload.x_elements
    offset = _FLOAT32 * workload.model.hidden_size * workload.model.norm_has_unit_offset
    return saved + _FLOAT32 * workload.tokens_between + offset


def _norms_by_operations(workload: RankWorkload) -> bool:
    """Return whether an RMSNorm consists of single operations, which work in float32."""
    model = workload.model
    in_short_dtype = model.norm_kind == "rms_norm" and not workload.accelerator and workload.a != _FLOAT32
    return in_short_dtype and not model.norm_has_unit_offset


def _norms_in_float32(workload: RankWorkload) -> bool:
    return workload.model.norm_has_unit_offset and workload.a != _FLOAT32


def _norms_copy_input(workload: RankWorkload) -> bool:
    """Return whether norms save float32 copies in place of their bfloat16 input."""
    return _norms_by_operations(workload) or _norms_in_float32(workload)


def _head_norms(workload: RankWorkload) -> int:
    """Return the bytes that norms of q and k save, without their input: it is counted with v, which shares its memory.

    1/rms in float32 for each token, of q and of k or of each of their heads. A norm over heads of several ranks also
    saves the lengths ‖q‖ and ‖k‖ of the rank's part. Norms of single operations save float32 copies, [2·T·(q + kv)/t].
    """
    model = workload.model
    width = workload.local.query + workload.local.key_value
    if model.query_key_norm is None:
        return 0
    statistics = width // model.head_dim if model.query_key_norm == "head" else 2
    if _norms_span_ranks(workload):
        statistics *= 2
    offset = 2 * model.head_dim * model.norm_has_unit_offset
    copies = (2 if _norms_by_operations(workload) else 1) * width if _norms_copy(workload) else 0
    return (workload.tokens * (statistics + copies) + offset) * _FLOAT32


def _norms_span_ranks(workload: RankWorkload) -> bool:
    return workload.model.query_key_norm == "all_heads" and workload.layout.tensor > 1


def _norms_copy(workload: RankWorkload) -> bool:
    """Return whether norms of q and k save float32 copies instead of their input."""
    return _norms_copy_input(workload) and not _norms_span_ranks(workload)


def _core(workload: RankWorkload, layer: int, *, copied: bool) -> tuple[int, int, int]:
    """Return bytes of the attention core: of its input, of the part of the input that it saves, and saved beside that.

    The input is the output of QKV, [T·(q + 2kv)/t], of which q, k and v are views. If rotation or a norm made new q and
    k (`copied`), these are [T·(q + kv)/t] more. With more ranks than key/value heads, kv/t is head_dim.

    A fused kernel saves its input and the log-sum-exp, [T·h/t] in float32 (arXiv:2205.14135). Step by step, the core
    saves

    | saved                                              | elements            |
    |----------------------------------------------------|---------------------|
    | P = softmax(q kᵀ)                                  | B·h/t·S² in float32 |
    | mask of dropout, one byte each                     | B·h/t·S²            |
    | P after dropout                                    | B·h/t·S²            |
    | causal mask, one byte each                         | S²                  |
    | q, scaled                                          | T·q/t               |
    | k and v, copies or as they are in the core's input | 2·T·q/t             |

    k and v are copied if several queries share them, or if their batches and heads are not contiguous. If they are not
    copied, or if norms of q and k save their input, the whole output of QKV stays.

    With keys gathered over context parallelism, a core step by step has keys and values of all c·T tokens. A fused one
    saves none of them where they are gathered again: a rank's k is kept as it was before rotation. Where it saves those
    of all tokens, q, k and v of a rank's parts are tensors by themselves, and its own v is free.
    """
    model = workload.model
    local = workload.local
    a = workload.a
    query = a * workload.tokens * local.query
    key_value = a * workload.tokens * local.key_value
    qkv = query + 2 * key_value
    context = workload.layout.context
    gathered = 2 * context * key_value if workload.gathers_keys else 0
    new = query + key_value if copied else 0
    drops_rotated = workload.gathers_keys_again or not workload.attends_step_by_step
    if gathered and drops_rotated and model.query_key_norm is None:
        new = query if copied else 0
    if not workload.attends_step_by_step:
        log_sum_exp = _FLOAT32 * workload.tokens * local.query // model.head_dim
        padding_mask = 0 if model.causal else a * workload.tokens
        kept = qkv + new
        if gathered and not workload.gathers_keys_again:
            kept += gathered - key_value
        return kept, kept, log_sum_exp + padding_mask
    mask = workload.config.train.sequence_length**2 if model.causal else workload.tokens
    if gathered or workload.dense_mask_elements(range(layer, layer + 1)):
        mask = 0  # blocks share it: `memory._shared_tables` counts it
    inside = (_FLOAT32 + 1 + a) * workload.probabilities + mask + query
    new_key = key_value if copied else 0
    norm_inputs = qkv if model.query_key_norm is not None and not _norms_copy(workload) else 0
    if gathered:
        copies = gathered if local.query == local.key_value else 2 * context * query
        return qkv + new + gathered, norm_inputs, inside + copies
    if local.query != local.key_value:
        return qkv + new, norm_inputs, inside + 2 * query
    if workload.config.train.micro_batch == 1 or model.interleaved_heads:
        return qkv + new, qkv + new_key, inside
    return qkv + new, norm_inputs + new_key, inside + 2 * key_value - new_key


# ---- gradients: what the backward pass holds beside saved tensors that are not free yet


def _mlp_gradients(workload: RankWorkload, feed: FeedForwardBytes) -> int:
    """Return the most that the MLP's backward pass holds: the gradient of x, [T/s, H], and the larger of two moments.

    At the last layer: the gradients of its input, [T·F/t], of its weight, [H·F/t], and of its output if that is not the
    gradient of x: [T·H] where it was gathered, [T·H/s] before dropout (whose mask is then free) or before a norm.
    Where `FeedForwardBytes.holds_two`: two of its inner width, [2·T·F/t].

    What a norm after the MLP saved is free at both moments. If the norm consists of single operations, its own
    gradients may be larger: [4·T/s·H] in float32.
    """
    model, layout = workload.model, workload.layout
    x = workload.x_bytes
    last = feed.at_work + feed.weight_gradients
    if layout.sequence_parallel:
        last += workload.gathered_bytes
    if workload.drops_hidden:
        last += (0 if layout.sequence_parallel else x) - workload.mask_elements
    if model.norms_output:
        last += 0 if layout.sequence_parallel else x
    most = max(last, 2 * feed.at_work) if feed.holds_two else last
    if model.norm_place == "input":
        return x + most
    norm = 4 * _FLOAT32 * workload.x_elements if _norms_copy_input(workload) else 0
    return x + max(most - norm_bytes(workload), norm)


def _core_gradients(workload: RankWorkload) -> int:
    """Return the most that the core's backward pass holds: gradients of x, of the values and of P, [B·h/t·S²].

    Only a core that goes step by step has the last one; in bfloat16 it is in float32, and a second one takes the place
    of P after dropout, whose memory is free by then. The core's output, the mask of the dropout after it, and what a
    norm after that saved are free too.
    """
    a = workload.a
    matrix = (_FLOAT32 if a == _FLOAT32 else 2 * _FLOAT32 - 1 - a) * workload.probabilities
    work = workload.x_bytes + a * workload.tokens * workload.local.query + matrix * workload.attends_step_by_step
    keys_and_values = 2 * workload.tokens * workload.local.key_value
    if workload.gathers_keys:
        # Keys and values of all tokens, gathered again, and their gradients.
        gathered = workload.layout.context * keys_and_values
        work += gathered * ((a if workload.gathers_keys_again else 0) + _FLOAT32)
    if workload.config.passes_keys:
        # Those that are used and those that arrive. Of gradients, the rank's own, terms of those that are used, what is
        # sent and what arrives.
        messages = min(2 * workload.layout.context - 3, 4)
        work += keys_and_values * (messages * a + 2 * _FLOAT32)
    return work - workload.mask_elements - (norm_bytes(workload) if workload.model.norm_place != "input" else 0)


def _mask_hashing(workload: RankWorkload) -> tuple[int, int]:
    """Return the bytes to hash a layout-invariant mask: of the probabilities; inside the MLP and of additions to x.

    A mask is hashed chunk by chunk. For each element of a chunk there are two 64-bit integers at a time, and one more
    that all samples of the micro-batch share: the element's number within its sample. In bfloat16 the scores are held
    beside the probabilities in float32 and in bfloat16; in float32 they take the place of P after dropout.
    """
    if workload.config.train.dropout_mode != "invariant":
        return 0, 0
    core = workload.probabilities if workload.model.attention_dropout_p else 0
    hidden = max(workload.mask_elements, workload.inner_mask_elements)
    chunks = (min(core, MASK_CHUNK_ELEMENTS), min(hidden, MASK_CHUNK_ELEMENTS))
    of_core, of_hidden = (_INT64 * (2 * chunk + chunk // workload.config.train.micro_batch) for chunk in chunks)
    return of_core + (workload.a * core if workload.a != _FLOAT32 else 0), of_hidden
