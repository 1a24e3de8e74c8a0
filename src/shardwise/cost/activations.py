"""Bytes that a stack of blocks keeps for its backward pass, with and without recompute, and holds at its peak.

Legend: see `cost/case.py`. What stands in brackets in a table is a tensor's elements; it takes `a` bytes each, or as
many as are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.cost.case import Case
from shardwise.plan.chunks import MASK_CHUNK_ELEMENTS

_FLOAT32, _INT64 = 4, 8


@dataclass(frozen=True)
class Block:
    """Bytes that autograd saves of one block, from its input on.

    Attributes:
        input: x, [T/s, H]. saves_input: whether it is one of the tensors counted below.
        attention: around the core: what its norm, QKV, output projection and dropout save.
        core_input: what keeps q, k and v as they are handed to the core, `softmax(q kᵀ) v`. core_input_saved: the part
        of it that the core saves; of the rest it saves copies.
        core: what the core saves inside.
        mlp: what the MLP with its norm and dropout saves.
    """

    input: int
    saves_input: bool
    attention: int
    core_input: int
    core_input_saved: int
    core: int
    mlp: int

    @property
    def saved(self) -> int:
        """All of the block."""
        return self.attention + self.core_input_saved + self.core + self.mlp


@dataclass(frozen=True)
class BlockStack:
    """Bytes of all blocks of one micro-batch, and of the gradients that their backward pass works with.

    Attributes:
        kept: at the end of the forward pass. peak: at most, during the backward pass.
    """

    kept: int
    peak: int


@dataclass(frozen=True)
class DropoutMasks:
    """What layout-invariant dropout costs one rank, with as many passes in flight as its schedule has at most.

    Attributes:
        bytes_held: attention probabilities, before and after dropout, and masks, at the peak.
        elements_hashed: of all masks of a step, recompute included.
        attends_step_by_step: whether attention, too, drops something, which no fused kernel can do with these masks.
    """

    bytes_held: int
    elements_hashed: int
    attends_step_by_step: bool


def invariant_masks(case: Case, in_flight: int = 1) -> DropoutMasks:
    """Masks of the probabilities, of both outputs that a block adds to x, and of the embedding.

    Recompute holds the probabilities of one block only, and hashes their masks twice; full recompute all in the blocks.

    in_flight: passes through a stage whose activations are held at once.
    """
    model, recompute, layers = case.model, case.config.train.recompute, case.layers
    held_layers = in_flight * layers // len(case.stages)
    core = case.probabilities if model.attention_dropout_p else 0
    hidden = 2 * case.tokens_between * model.hidden_size if case.drops_hidden else 0
    drops_embedding = case.has_first and model.embedding_dropout_p
    embedding = case.tokens_between * model.hidden_size if drops_embedding else 0
    core_again, hidden_again = recompute != "none", recompute == "full"
    held = (1 if core_again else held_layers) * core * (_FLOAT32 + 1 + case.a)
    held += (1 if hidden_again else held_layers) * hidden + in_flight * embedding
    hashed = layers * (core * (1 + core_again) + hidden * (1 + hidden_again)) + embedding
    return DropoutMasks(held, hashed * case.micro_batches, core > 0)


def block_stack(case: Case, layers: Iterable[int] | None = None) -> BlockStack:
    """What these blocks, or all of this rank's, hold of one micro-batch.

    | recompute | kept                                    | computed again, a block at a time |
    |-----------|-----------------------------------------|-----------------------------------|
    | none      | L blocks                                |                                   |
    | selective | L blocks without the inside of the core | the inside of the core            |
    | full      | L inputs                                | the block, beside its input       |

    The backward pass of a block begins with the MLP, whose part is free when that of the core begins. What later blocks
    kept is free by then.
    """
    if layers is None:
        layers = [layer for stage in case.stages for layer in stage.layers]
    kept = most = 0
    for layer in layers:
        here, work = _kept_and_work(case, block_activations(case, layer))
        kept += here
        most = max(most, kept + work)
    return BlockStack(kept, most)


def _kept_and_work(case: Case, block: Block) -> tuple[int, int]:
    """What one block keeps, and what its backward pass holds beside that at most."""
    x, query = block.input, case.a * case.tokens * case.local.query
    mlp, core = _mlp_gradients(case), _core_gradients(case)
    core_mask, hidden_mask = _mask_hashing(case)
    match case.config.train.recompute:
        case "none":
            return block.saved, max(mlp, core - block.mlp, core_mask - block.mlp, hidden_mask)
        case "selective":
            kept = block.attention + block.core_input + block.mlp
            return kept, max(mlp, block.core + max(core, core_mask + x + query) - block.mlp, hidden_mask)
        case "full":
            again = block.saved - (x if block.saves_input else 0)
            return x, again + max(mlp, core - block.mlp, core_mask + x - block.mlp, hidden_mask + x)


def block_activations(case: Case, layer: int) -> Block:
    """What that block saves.

    | part      | saved                                                | elements          |
    |-----------|------------------------------------------------------|-------------------|
    | attention | input of QKV, gathered or not                        | T·H               |
    |           | attention output, the output projection's input      | T·q/t             |
    |           | norms of q and k: statistics                         | see `_head_norms` |
    | core      | q, k and v, and what the core saves beside them      | see `_core`       |
    | MLP       | input of the first layer, gathered or not            | T·H               |
    |           | gated: gate and up, silu(gate), silu(gate)·up        | 4·T·F/t           |
    |           | else: input and output of the activation             | 2·T·F/t           |
    | both      | the norm: its input and a statistic or two           | T·H/s, …          |
    |           | mask of dropout on what is added to x, one byte each | T·H/s             |

    Where norms come first, x itself is the input of the first one; where they come last (BERT, OLMo 2), x is QKV's
    input unless it had to be gathered. Both norms of a parallel residual have the same input. ReLU saves its output
    only.
    """
    model, local, a = case.model, case.local, case.a
    x = a * case.tokens_between * model.hidden_size
    mask = case.tokens_between * model.hidden_size if case.drops_hidden else 0
    entered, feed = a * case.tokens * model.hidden_size, a * case.tokens * local.intermediate
    attention = entered + a * case.tokens * local.query + mask + _head_norms(case)
    core_input, core_input_saved, core = _core(case, copied=model.rotates(layer) or model.query_key_norm is not None)
    mlp = entered + (4 if model.gated else 2) * feed + mask
    if model.activation == "relu":
        mlp -= feed
    if model.norm_place == "input":
        saves_input = model.norm_kind == "layer_norm" or case.accelerator or a == _FLOAT32
    else:
        saves_input = not case.layout.sequence
    return Block(
        input=x,
        saves_input=saves_input,
        attention=attention + norm_bytes(case),
        core_input=core_input,
        core_input_saved=core_input_saved,
        core=core,
        mlp=mlp + norm_bytes(case) - (x if model.parallel_residual else 0),
    )


def waiting_bytes(case: Case) -> int:
    """What a block holds on top from the gradient of its input until those of its weights, where these come later.

    The gradient of what each matrix product and norm gives: of QKV, [T·(q + 2kv)/t], of q and k where these have norms,
    [T·(q + kv)/t], of both outputs, [2·T·H], of the first layer of the MLP, [T·F/t] (gated: twice), and of both norms,
    [2·T/s·H]. And the inside of the core, where it was computed again.
    """
    hidden, local = case.model.hidden_size, case.local
    first = (2 if case.model.gated else 1) * local.intermediate
    normed = local.query + local.key_value if case.model.query_key_norm else 0
    wide = case.tokens * (local.query + 2 * local.key_value + normed + 2 * hidden + first)
    again = block_activations(case, case.stages[0].layers[0]).core if case.config.train.recompute == "selective" else 0
    return case.a * (wide + 2 * case.tokens_between * hidden) + again


def norm_bytes(case: Case) -> int:
    """A norm on the residual stream.

    LayerNorm saves its input, mean and 1/deviation, both float32 on an accelerator. RMSNorm saves its input, and 1/rms
    in float32; in bfloat16 on a CPU it is made of single operations that save its input and the normalised input, both
    in float32.
    """
    hidden = case.model.hidden_size
    if case.model.norm_kind == "layer_norm":
        statistic = _FLOAT32 if case.accelerator else case.a
        return case.tokens_between * (case.a * hidden + 2 * statistic)
    element = 2 * _FLOAT32 if _norms_by_operations(case) else case.a
    return case.tokens_between * (element * hidden + _FLOAT32)


def _norms_by_operations(case: Case) -> bool:
    """Whether an RMSNorm is made of single operations, which work in float32."""
    return case.model.norm_kind == "rms_norm" and not case.accelerator and case.a != _FLOAT32


def _head_norms(case: Case) -> int:
    """What norms of q and k save beside their input, which v keeps alive.

    1/rms in float32, [T] of each, or for each head where they are apart; over the heads of several ranks, the norm
    itself as well.
    """
    model, width = case.model, case.local.query + case.local.key_value
    if model.query_key_norm is None:
        return 0
    statistics = width // model.head_dim if model.query_key_norm == "head" else 2
    if _norms_together(case):
        statistics *= 2
    return case.tokens * (statistics + (2 * width if _norms_copies(case) else 0)) * _FLOAT32


def _norms_together(case: Case) -> bool:
    """Whether norms of q and k are over heads of several ranks."""
    return case.model.query_key_norm == "all_heads" and case.layout.tensor > 1


def _norms_copies(case: Case) -> bool:
    """Whether norms of q and k save float32 copies in place of their input."""
    return _norms_by_operations(case) and not _norms_together(case)


def _core(case: Case, *, copied: bool) -> tuple[int, int, int]:
    """Of the attention core: what its input keeps alive, the part of that which it saves, what it saves beside.

    The input is the QKV output, [T·(q + 2kv)/t], with v as a view of it, and q and k too; where rotation or a norm has
    `copied` these, they are [T·(q + kv)/t] more. A key/value projection that is replicated beyond its heads has
    kv/t = head_dim. Fused kernels save the input, and the log-sum-exp, [T·h/t] in float32. Step by step, the core saves

    | saved                                             | elements            |
    |---------------------------------------------------|---------------------|
    | P = softmax(q kᵀ)                                 | B·h/t·S² in float32 |
    | mask of dropout, one byte each                    | B·h/t·S²            |
    | P after dropout                                   | B·h/t·S²            |
    | causal mask, one byte each                        | S²                  |
    | q, scaled                                         | T·q/t               |
    | k and v, copied or as they are in the core's input | 2·T·q/t             |

    Copied are those that several queries share, and those whose batches and heads do not lie behind one another. Where
    they are not, or norms of q and k save their input, all of the QKV output stays.
    """
    model, local, a = case.model, case.local, case.a
    query, key_value = (a * case.tokens * width for width in (local.query, local.key_value))
    qkv, made = query + 2 * key_value, (query + key_value if copied else 0)
    if not case.attends_step_by_step:
        log_sum_exp = _FLOAT32 * case.tokens * local.query // model.head_dim
        padding_mask = 0 if model.causal else a * case.tokens
        return qkv + made, qkv + made, log_sum_exp + padding_mask
    masks = case.config.train.sequence_length**2 if model.causal else case.tokens
    if case.config.data.reset_attention_mask:
        masks = 0  # of all blocks one, which is added
    inside = (_FLOAT32 + 1 + a) * case.probabilities + masks + query
    made_key = key_value if copied else 0
    norm_inputs = qkv if model.query_key_norm is not None and not _norms_copies(case) else 0
    if local.query != local.key_value:
        return qkv + made, norm_inputs, inside + 2 * query
    if case.config.train.micro_batch == 1 or model.interleaved_heads:
        return qkv + made, qkv + made_key, inside
    return qkv + made, norm_inputs + made_key, inside + 2 * key_value - made_key


# ---- gradients, beyond what was saved and is not free yet


def _mlp_gradients(case: Case) -> int:
    """At the MLP's largest moment: the gradient of x, [T/s, H], and one of two.

    At the last layer: the gradient of its input, [T·F/t], that of its weight, [H·F/t], and that of its output where it
    is not x's, [T·H] gathered or [T·H/s] behind dropout, whose mask is free, or behind a norm of the output.
    At silu(gate)·up of a gated MLP and at ReLU: two gradients, [2·T·F/t]. A norm behind the MLP is free by then;
    made of single operations, its own gradients may be more: [4·T/s·H] in float32.
    """
    model, layout, a = case.model, case.layout, case.a
    x, feed = a * case.tokens_between * model.hidden_size, a * case.tokens * case.local.intermediate
    weight = case.gradient_bytes(case.local.intermediate * model.hidden_size)
    last = feed + weight
    if layout.sequence:
        last += a * case.tokens * model.hidden_size
    if case.drops_hidden:
        last += (0 if layout.sequence else x) - x // a
    if model.norm_place == "output":
        last += 0 if layout.sequence else x
    most = max(last, 2 * feed) if model.gated or model.activation == "relu" else last
    if model.norm_place == "input":
        return x + most
    norm = 4 * _FLOAT32 * case.tokens_between * model.hidden_size if _norms_by_operations(case) else 0
    return x + max(most - norm_bytes(case), norm)


def _core_gradients(case: Case) -> int:
    """At the core's largest moment, step by step: the gradients of x, of the values and of a matrix [B, h/t, S, S].

    The core's output and the mask of dropout behind it, and a norm behind that, are free by then, as the MLP's part is.
    In bfloat16 the matrix is in float32, and one more is there in place of the probabilities after dropout.
    """
    a = case.a
    x, query = (a * n for n in (case.tokens_between * case.model.hidden_size, case.tokens * case.local.query))
    matrix = (_FLOAT32 if a == _FLOAT32 else 2 * _FLOAT32 - 1 - a) * case.probabilities
    work = x + query + (matrix if case.attends_step_by_step else 0)
    if case.drops_hidden:
        work -= x // a
    return work - (norm_bytes(case) if case.model.norm_place != "input" else 0)


def _mask_hashing(case: Case) -> tuple[int, int]:
    """64-bit integers that layout-invariant masks are made with, of the probabilities and between the cut layers.

    A chunk of a mask's elements has three at a time, and one for all its samples: the element's number in a sample.
    """
    if case.config.train.dropout_mode != "invariant":
        return 0, 0
    core = case.probabilities if case.model.attention_dropout_p else 0
    hidden = case.tokens_between * case.model.hidden_size if case.drops_hidden else 0
    chunks = (min(core, MASK_CHUNK_ELEMENTS), min(hidden, MASK_CHUNK_ELEMENTS))
    of_core, of_hidden = (_INT64 * (3 * chunk + chunk // case.config.train.micro_batch) for chunk in chunks)
    return of_core, of_hidden
