"""Self-attention of every family, and the frame of a block around it.

Shapes: see `models/blocks.py`. Keys that a query does not see, because they are of another document or beyond a window,
are left out in one of four ways (`AttentionMask.form`):

- on a CPU, by pieces (`attention_pieces.py`): torch's kernel is called for each document;
- on an accelerator whose kernel takes documents of any length, and whose ranks have whole samples, by that kernel;
- on other accelerators, in a compiled model or with a long sequence, by FlexAttention;
- else, and always with dropout of the probabilities, by a dense mask, which has S² elements a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.config import FamilyConfig
from shardwise.distributed.placement import Init
from shardwise.distributed.torch_private import calls_only_forward, has_fused_attention, others_keep_tensors
from shardwise.layers.dropout import AnyKey, DropoutKey, Place, apply_mask
from shardwise.layers.linear import GQAQKVColumnParallelLinear
from shardwise.layers.norm import QueryKeyNorm
from shardwise.layers.recompute import Recomputed, can_drop, dropping
from shardwise.models.blocks import ATTENTION, BlockContext, LayerFactory
from shardwise.models.masks import KernelMask, Mask
from shardwise.models.rotary import RotateJoined, rotate

_Tables = tuple[Tensor, Tensor] | None  # cosines and sines by which queries and keys are rotated


class AttentionCore(nn.Module):
    """`softmax(scale · q kᵀ) v`, with dropout of the probabilities; by default the scale is 1 / √d.

    torch's fused kernels compute it, except with `invariant` dropout, whose mask no kernel takes, and with any dropout
    on a CPU, which lacks a fused kernel for it. Then the probabilities `[B, n, S, S]` are in memory.
    """

    def __init__(self, config: FamilyConfig, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        self.causal = config.causal
        self.window = config.window(layer)
        self.scale = config.attention_scale
        self.p = config.attention_dropout_p
        self.context_group = factory.context_group
        self.place = Place(layer, ATTENTION, self.context_group.rank * factory.group.size + factory.group.rank)
        self.recompute = factory.recompute == "selective"
        self.group = factory.group
        self.head_products = factory.head_products

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: BlockContext) -> Tensor:
        """q `[S, B, n, d]`, k and v `[L, B, m, d]`, where m divides n and L ≥ S → `[S, B, n·d]`."""
        mask = context.masks.get(self.window)
        key = context.dropout if self.p else None
        if not isinstance(mask, KernelMask):
            order = (1, 2, 0, 3)
            q, k, v = q.permute(order), k.permute(order), v.permute(order)
        if self.recompute and torch.is_grad_enabled() and not self._is_fused(q, k, v, mask, key):
            # Masks of dropout depend on the context's key alone: no generator's state must be kept for them.
            arguments = (q, k, v, mask, key)
            out: Tensor = checkpoint(self._attend, *arguments, use_reentrant=False, preserve_rng_state=False)
            return out
        return self._attend(q, k, v, mask, key)

    def _is_fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, key: AnyKey | None) -> bool:
        """Return whether one kernel computes it and keeps its inputs, its output and the logarithms of sums alone."""
        if self.goes_by_steps(q, key):
            return False
        if torch.compiler.is_compiling() or isinstance(mask, KernelMask):
            return True
        p = self.p if key is not None else 0.0
        is_grouped = q.shape[1] != k.shape[1]
        return has_fused_attention(q, k, v, mask, p, causal=self.causal and mask is None, is_grouped=is_grouped)

    def goes_by_steps(self, q: Tensor, key: AnyKey | None) -> bool:
        """Return whether softmax, dropout and products are operations of their own, as no kernel has this dropout."""
        is_in_kernel = isinstance(key, DropoutKey) and key.mode == "fast" and q.device.type != "cpu"
        return self.p > 0 and key is not None and not is_in_kernel

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, key: AnyKey | None) -> Tensor:
        if isinstance(mask, KernelMask):
            return mask.attend(q, k, v, self.scale).flatten(2)
        if key is not None and self.goes_by_steps(q, key):
            out = self._step_by_step(q, k, v, mask, key)
        else:
            # torch aligns its causal mask with the first key; a query after cached keys sees all of them.
            causal = self.causal and mask is None and q.shape[2] == k.shape[2]
            seeded: AbstractContextManager[None] = nullcontext()
            if isinstance(key, DropoutKey):
                seeded = key.seeded(q.device, self.place.layer, ATTENTION, self.place.shard)
            with seeded:
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    mask,
                    dropout_p=0.0 if key is None else self.p,
                    is_causal=causal,
                    scale=self.scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _step_by_step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key: AnyKey) -> Tensor:
        copies = q.shape[1] // k.shape[1]
        if copies > 1:
            k = k.repeat_interleave(copies, dim=1)
            v = v.repeat_interleave(copies, dim=1)
        # q is scaled in place of the scores, as it has fewer elements.
        scale = 1.0 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        scores = self.head_products(q * scale, k.transpose(-1, -2))
        if mask is None and self.causal:
            length = q.shape[-2]
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_()
        if mask is not None and mask.is_floating_point():
            scores = scores + mask
        elif mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        # In float32, as the fused kernels do: a sum of many bfloat16 terms would lose digits.
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.head_products(self._drop(probabilities, key), v)

    def _drop(self, probabilities_BnSL: Tensor, key: AnyKey) -> Tensor:
        if key.mode == "fast":
            return key.dropped(probabilities_BnSL, self.p, self.place)
        # Rows are numbered over the heads of all ranks, so that the mask of a head does not depend on the layout.
        heads, rows, length = probabilities_BnSL.shape[1:]
        places = key.places_S
        if places is None:
            places = torch.arange(rows, device=probabilities_BnSL.device)
        first_head = key.shard(self.place) % self.group.size * heads
        heads_n1 = torch.arange(heads, device=places.device).unsqueeze(1) + first_head
        keep_RBL = key.keep((heads_n1 * length + places).flatten(), length, self.p, self.place)
        keep_BnSL = keep_RBL.unflatten(0, (heads, rows)).permute(2, 0, 1, 3)
        return apply_mask(probabilities_BnSL, keep_BnSL, self.p)


def _saving_attention() -> Any:
    """Return the contexts of a checkpoint that keeps what attention returns, and computes all else again."""

    def policy(_context: Any, operator: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
        is_attention = "attention" in str(operator)
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Attention(nn.Module):
    """Self-attention: each rank computes its own heads, between a column-parallel layer and a row-parallel one.

    Args:
        layer: number of the block.
        qkv: the layer x → Q, K and V, in one matmul.
        out: canonical name of the output projection.
        bias: true if the output projection has a bias.
        transposed: true if its canonical weight is `[in, out]`.
        rotates: true if q and k are rotated by their positions.
        norm: the norm of q and k; None: none.
        out_init: initial values of the output projection; None: those of all layers.
    """

    def __init__(
        self,
        config: FamilyConfig,
        layer: int,
        factory: LayerFactory,
        qkv: nn.Module,
        out: str,
        *,
        bias: bool = True,
        transposed: bool = False,
        rotates: bool = False,
        norm: QueryKeyNorm | None = None,
        out_init: Init | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotates = rotates
        self.recomputes_block = factory.recompute == "full"
        # A norm of q and k is no cheap function where it communicates, and keeps its input.
        self.drops_rotated = factory.drops_cheap and norm is None
        # What a norm or a sum by parts makes of q, k and v are tensors by themselves.
        self.joins_heads = norm is None and type(self).heads is Attention.heads and not factory.group.has_parts
        key_heads = max(config.num_key_value_heads // factory.group.size, 1)
        self.widths = (config.num_attention_heads // factory.group.size, key_heads, key_heads)
        self.layer = layer
        self.qkv = qkv
        self.norm = norm
        self.core = AttentionCore(config, layer, factory)
        width = config.num_attention_heads * config.head_dim
        self.out = factory.row(config, width, out, bias=bias, transposed=transposed, init=out_init)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each `[S, B, heads, d]`."""
        q, k, v = self.qkv(x)
        heads = (-1, self.head_dim)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v, normalised if there is a norm, each `[S, B, heads, d]`; or one tensor of all heads."""
        if self.joins_heads and calls_only_forward(self.qkv, GQAQKVColumnParallelLinear):
            return (self.qkv.joined(x).unflatten(-1, (-1, self.head_dim)),)
        q, k, v = self.heads(x)
        if self.norm is not None:
            q, k = self.norm(q, k)
        return q, k, v

    def attend(self, projected: Sequence[Tensor], context: BlockContext) -> Tensor:
        """Return the input of the output projection, `[S, B, n·d]`, of q, k and v as `project` gives them."""
        tables: _Tables = None
        if self.rotates:
            cos, sin = context.rotary_tables[self.core.window]
            tables = (cos.to(projected[0].dtype), sin.to(projected[0].dtype))
        keeps = not (context.gathers_keys or context.cache or context.parts)
        if len(projected) == 1:
            if keeps and tables is not None and not others_keep_tensors():
                rotated = RotateJoined.apply(*projected, self.widths, *tables)  # type: ignore[no-untyped-call]
                return cast(Tensor, self.core(*rotated, context))
            projected = projected[0].split(self.widths, dim=2)
        q, k, v = projected
        if keeps and not (self.rotates and self.drops_rotated):
            if tables is not None:
                q, k = rotate(q, *tables), rotate(k, *tables)
            return cast(Tensor, self.core(q, k, v, context))
        return self._attend_dropping(q, k, v, tables, context)

    def _attend_dropping(self, q: Tensor, k: Tensor, v: Tensor, tables: _Tables, context: BlockContext) -> Tensor:
        """Return what `attend` does, and compute again what is not kept for the backward pass."""
        gathers = context.gathers_keys
        drops_rotated = tables is not None and self.drops_rotated
        sources: list[Recomputed] = []

        def rotated(x: Tensor) -> Tensor:
            return x if tables is None else rotate(x, *tables)

        def of_all_tokens(x: Tensor) -> Tensor:
            if not gathers:
                return x
            from shardwise.layers.context import gather_chunks

            return gather_chunks(x, self.core.context_group)

        def made(function: Callable[[Tensor], Tensor], x: Tensor, *, drops: bool) -> Tensor:
            if not (drops and context.cache is None and can_drop(x)):
                return function(x)
            sources.append(Recomputed(function, x))
            return sources[-1].result

        def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = self.core(rotated(q), of_all_tokens(rotated(k)), of_all_tokens(v), context)
            return out

        # Keys and values of all tokens are gathered again: kept, they would be as many times those of this rank's
        # tokens as ranks share a sample. A core that goes by steps keeps copies of them in any case, and several parts
        # would each gather them.
        keeps_gathered = self.recomputes_block or self.core.goes_by_steps(q, context.dropout) or len(context.parts) > 1
        drops_gathered = gathers and not keeps_gathered
        if drops_gathered and torch.compiler.is_compiling() and torch.is_grad_enabled():
            # A compiler keeps what collectives return, unless it is told to repeat them.
            attended: Tensor = checkpoint(
                repeated, q, k, v, use_reentrant=False, preserve_rng_state=False, context_fn=_saving_attention
            )
            return attended
        q = made(rotated, q, drops=drops_rotated)
        k = made(lambda k: of_all_tokens(rotated(k)), k, drops=drops_gathered or drops_rotated)
        v = made(of_all_tokens, v, drops=drops_gathered)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v, self.core.window)
        with dropping(*sources) if sources else nullcontext():
            if context.parts:
                return self._attend_by_part(q, k, v, context.parts)
            out: Tensor = self.core(q, k, v, context)
        return out

    def _attend_by_part(self, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[BlockContext]) -> Tensor:
        from shardwise.layers.bitwise.replicated import part_views

        count = len(parts)
        by_part = zip(q.chunk(count), part_views(k, count, None), part_views(v, count, None), parts, strict=True)
        return torch.cat([self.core(*arguments) for arguments in by_part])


class Block(nn.Module):
    """Layers before attention, attention, and layers behind it.

    Each token goes through the layers before and behind by itself, and meets other tokens in attention alone.
    """

    attention_name: ClassVar[str] = "attention"
    """Name of the module that is the block's `Attention`."""

    def before_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what `Attention.project` does."""
        raise NotImplementedError

    def behind_attention(self, x: Tensor, attended: Tensor, context: BlockContext) -> Tensor:
        """Return the block's output, of its input and of the input of attention's output projection `[S, B, n·d]`."""
        raise NotImplementedError

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        if context.parts:
            return self._forward_by_part(x, context)
        attention: Attention = getattr(self, self.attention_name)
        return self.behind_attention(x, attention.attend(self.before_attention(x), context), context)

    def _forward_by_part(self, x: Tensor, context: BlockContext) -> Tensor:
        from shardwise.layers.bitwise.replicated import SequenceParts

        attention: Attention = getattr(self, self.attention_name)
        layers = SequenceParts(self, attention.core.context_group)
        count = len(context.parts)
        xs = x.chunk(count)
        projected = layers.results(self.before_attention, xs)
        joined = [torch.cat(by_part) for by_part in zip(*projected, strict=True)]
        attended = attention.attend(joined, context).chunk(count)
        return torch.cat(layers.results(self.behind_attention, xs, attended, context.parts))
