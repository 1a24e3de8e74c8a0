"""The parts that families share, except attention: layers made from a configuration, MLP, stages, key-value cache.

Legend, per rank: S sequence, B batch, H hidden, V vocabulary, g tensor-parallel ranks, n local heads, d head width.
Between blocks the residual stream is x `[S, B, H]`, or `[S/g, B, H]` with sequence parallelism.

Of the key-value cache: L tokens for which there is room, S new tokens, m key and value heads of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.config import FamilyConfig, Recompute
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Init, share
from shardwise.layers.arguments import sharing_group
from shardwise.layers.dropout import AnyKey, Dropout
from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead, ReplicatedEmbedding
from shardwise.layers.execution import Execution, execution, made_with
from shardwise.layers.linear import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    LayerOptions,
    LinearOptions,
    RowParallelLinear,
)
from shardwise.layers.norm import LayerNorm, QueryKeyNorm, RMSNorm
from shardwise.layers.recompute import compose
from shardwise.models.masks import Mask

_Config = TypeVar("_Config", bound=FamilyConfig)
_Norm = LayerNorm | RMSNorm

ATTENTION, AFTER_ATTENTION, AFTER_MLP, INSIDE_MLP = range(4)
"""Sites of dropout in a block."""
EMBEDDING = -1
"""The layer number of the embedding in dropout's keys: it comes before the first block, which has number 0."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class ModelPart:
    """What a `FamilyModel` builds of its model: blocks, and embedding or head; by default all of it."""

    layers: range | None = None  # numbers of its blocks; None: all
    is_first: bool = True  # true if it has the embedding
    is_last: bool = True  # true if it has the head
    # Group of the two ranks with the first and the last stage; of size 1 on other ranks, and if one has both.
    ends: Group = field(default_factory=Group)
    # Word embeddings of earlier stages of this rank, by name. A rank with both ends thereby has a tied one once.
    embeddings: dict[str, ParallelEmbedding] = field(default_factory=dict)

    def block_numbers(self, config: FamilyConfig) -> range:
        """Return the numbers of the blocks of this part."""
        return range(config.num_hidden_layers) if self.layers is None else self.layers


@dataclass(frozen=True)
class LayerFactory:
    """Makes the layers of a family's blocks from its configuration: holds all their other arguments."""

    # group, sequence_parallel, recompute, part, vocab_multiple: as in `FamilyModel`.
    group: Group
    sequence_parallel: bool
    recompute: Recompute
    part: ModelPart
    vocab_multiple: int
    options: LayerOptions  # arguments that all layers take
    in_blocks: Execution  # how the layers of blocks compute

    @property
    def context_group(self) -> Group:
        """The ranks that share each sample."""
        return self.in_blocks.context_group

    @property
    def drops_cheap(self) -> bool:
        """True if results that are cheap to compute are not kept for the backward pass."""
        return self.recompute == "selective"

    @property
    def drops_normed(self) -> bool:
        """The same of the inputs of column-parallel layers, which keep what they gathered of them."""
        keeps_input = self.group.size == 1 or not self.sequence_parallel or self.in_blocks.regathers
        return self.drops_cheap and keeps_input

    def activation(self, config: FamilyConfig) -> Callable[[Tensor], Tensor]:
        """Return the activation function of a rank's part of the width."""
        function = ACTIVATIONS[config.activation]
        if self.group.has_parts:
            from shardwise.layers.bitwise.functions import activate_by_part

            return partial(activate_by_part, function=function, count=self.group.parts)
        return function

    @property
    def head_products(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The product of each head's matrices."""
        if not self.group.has_parts:
            return torch.matmul
        from shardwise.layers.bitwise.functions import head_products

        return partial(head_products, count=self.group.parts)

    def has_embedding(self, config: FamilyConfig) -> bool:
        """Return whether this part has the word embedding, for its input or as the head's weight."""
        return self.part.is_first or (self.part.is_last and config.tie_word_embeddings)

    def word_embedding(self, config: FamilyConfig, name: str, padding_idx: int | None = None) -> ParallelEmbedding:
        """Make the layer ids → x. If both ends of a pipeline hold a tied one, its gradient is partial over them."""
        if name in self.part.embeddings:
            # A rank with both ends: its input and its head use one tensor, whose gradients autograd adds.
            return self.part.embeddings[name]
        embedding = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            padding_idx,
            sequence_parallel_enabled=self.sequence_parallel,
            row_multiple=self.vocab_multiple,
            name=name,
            **self.options,
        )
        self.part.embeddings[name] = embedding
        if config.tie_word_embeddings and self.part.ends.size > 1:
            # Each end has a tensor of its own, and computes the part of the gradient that its use of it makes.
            share(embedding.weight, self.part.ends)
        return embedding

    def small_embedding(self, config: FamilyConfig, name: str, rows: int) -> ReplicatedEmbedding:
        """Make the layer positions or token types → a term of x, with the whole table on every rank."""
        return ReplicatedEmbedding(
            rows, config.hidden_size, sequence_parallel_enabled=self.sequence_parallel, name=name, **self.options
        )

    def blocks(self, config: _Config, make: Callable[[_Config, int, LayerFactory], nn.Module]) -> nn.ModuleList:
        """Make the blocks of this part, each of them compiled where blocks are."""
        compiler = self.in_blocks.compiler
        blocks = nn.ModuleList()
        with made_with(self.in_blocks):
            for layer in self.part.block_numbers(config):
                block = make(config, layer, self)
                if compiler is not None:
                    compiler.add_block(block, str(layer), layer)
                blocks.append(block)
        return blocks

    def query_key_value(
        self, config: FamilyConfig, names: Sequence[str], *, bias: bool = True, transposed: bool = False
    ) -> GQAQKVColumnParallelLinear:
        """Make the layer x → Q, K and V, one after the other; the same name three times if they are one."""
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        return GQAQKVColumnParallelLinear(
            config.hidden_size,
            (q_size, kv_size),
            bias=bias,
            gather_output=False,
            head_dim=config.head_dim,
            names=names,
            sequence_parallel_enabled=self.sequence_parallel,
            **LinearOptions(**self.options, transposed=transposed),
        )

    def column(
        self, config: FamilyConfig, outputs: int, name: str, *, bias: bool = True, transposed: bool = False
    ) -> ColumnParallelLinear:
        """Make the layer x → this rank's part of some outputs."""
        return ColumnParallelLinear(
            config.hidden_size,
            outputs,
            bias=bias,
            gather_output=False,
            sequence_parallel_enabled=self.sequence_parallel,
            name=name,
            **LinearOptions(**self.options, transposed=transposed),
        )

    def row(
        self,
        config: FamilyConfig,
        inputs: int,
        name: str,
        *,
        bias: bool = True,
        transposed: bool = False,
        init: Init | None = None,
    ) -> RowParallelLinear:
        """Make the layer of a rank's part of some inputs → a term of x; `init` None: that of all layers."""
        options = LinearOptions(**self.options, transposed=transposed)
        if init is not None:
            options["init"] = init
        return RowParallelLinear(
            inputs,
            config.hidden_size,
            bias=bias,
            input_is_parallel=True,
            sequence_parallel_enabled=self.sequence_parallel,
            name=name,
            **options,
        )

    def query_key_norm(self, config: FamilyConfig, names: tuple[str, str]) -> QueryKeyNorm | None:
        """Make the layer q and k → both normalised; None in a family without it."""
        if config.query_key_norm is None:
            return None
        return QueryKeyNorm(
            (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim),
            config.norm_eps,
            head_dim=config.head_dim,
            over=config.query_key_norm,
            names=names,
            unit_offset=config.norm_has_unit_offset,
            **self.options,
        )

    def norm(self, config: FamilyConfig, name: str, kind: type[_Norm] = LayerNorm) -> _Norm:
        """Make the layer x → x normalised."""
        offset = {"unit_offset": True} if config.norm_has_unit_offset else {}
        return kind(
            config.hidden_size,
            config.norm_eps,
            sequence_parallel_enabled=self.sequence_parallel,
            name=name,
            **offset,
            **self.options,
        )

    def dropout(self, p: float, layer: int, site: int) -> Dropout:
        """Make the dropout of a term of the residual stream."""
        return Dropout(
            p,
            layer=layer,
            site=site,
            group=self.group,
            sequence_parallel_enabled=self.sequence_parallel,
            context_group=self.context_group,
        )

    def head(self, config: FamilyConfig, name: str, embedding: str) -> ParallelLMHead:
        """Make the layer x → logits or losses. A tied head has the weight of the embedding named `embedding`."""
        tied_weight = self.part.embeddings[embedding].weight if config.tie_word_embeddings else None
        return ParallelLMHead(
            config.hidden_size,
            config.vocab_size,
            tied_weight=tied_weight,
            sequence_parallel_enabled=self.sequence_parallel,
            row_multiple=self.vocab_multiple,
            name=name,
            **self.options,
        )


@dataclass(frozen=True)
class BlockContext:
    """Inputs that all transformer blocks of a model share in one forward pass.

    Attributes:
        dropout: the step's key; None: no dropout.
        masks: window of a block → keys that its queries see; a tensor `[B, 1, 1, S]` is true for them, and one
            `[B, 1, S, L]` is added to the scores. Without a mask they see all, in a causal model those up to the query.
        rotary_tables: window of a block → cosines and sines of these tokens' positions; empty with learned positions.
        gathers_keys: true if context parallelism cuts the samples, and attention gathers keys and values of all ranks.
        parts: the same for each part of the rank's tokens, in a bit-equal training with context parallelism.
    """

    dropout: AnyKey | None = None
    masks: Mapping[int | None, Mask | None] = field(default_factory=dict)
    cache: KeyValueCache | None = None
    rotary_tables: Mapping[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    gathers_keys: bool = False
    parts: Sequence[BlockContext] = ()

    @property
    def first_position(self) -> int:
        """Position of the first token of this pass."""
        return 0 if self.cache is None else self.cache.length


class MLP(nn.Module):
    """`down(dropout(act(up(x))))`.

    Args:
        names: the canonical layers of up and down.
        transposed: true if their canonical weights are `[in, out]`.
        down_init: initial values of down's weight; None: those of all layers.
    """

    def __init__(
        self,
        config: FamilyConfig,
        layer: int,
        factory: LayerFactory,
        names: tuple[str, str],
        *,
        transposed: bool = False,
        down_init: Init | None = None,
    ) -> None:
        super().__init__()
        self.up = factory.column(config, config.intermediate_size, names[0], transposed=transposed)
        self.act = factory.activation(config)
        # ReLU keeps its result in place of its input.
        self.drops_activated = factory.drops_cheap and config.activation != "relu"
        # Here the width is cut over the ranks, elsewhere the sequence or nothing.
        self.dropout = Dropout(
            config.ffn_dropout_p,
            layer=layer,
            site=INSIDE_MLP,
            group=factory.group,
            input_is_parallel=True,
            context_group=factory.context_group,
        )
        self.down = factory.row(config, config.intermediate_size, names[1], transposed=transposed, init=down_init)

    def feed(self, x: Tensor, context: BlockContext, then: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `then` of the input of the second projection, `[S, B, F/g]`."""

        def activated(up: Tensor) -> Tensor:
            return cast(Tensor, self.dropout(self.act(up), context.dropout))

        return compose(then, activated, self.up(x), drops=self.drops_activated)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        return self.feed(x, context, self.down)


def run_blocks(blocks: nn.ModuleList, x: Tensor, context: BlockContext, recompute: Recompute) -> Tensor:
    """Run a model's blocks, x → x; with `full` recompute only each block's input is kept for the backward pass."""
    for block in blocks:
        # Dropout masks depend on the context's key alone, so that recomputed masks are the same without a saved state.
        if recompute == "full" and torch.is_grad_enabled():
            x = checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False)
        else:
            x = block(x, context)
    return x


class FamilyModel(nn.Module, Generic[_Config]):
    """The base class of the models of all families: a module made from a configuration.

    Args:
        config: sizes by their Hugging Face names.
        group: the tensor-parallel ranks.
        sequence_parallel: true if the residual stream is cut along the sequence between blocks.
        recompute: part that the backward pass computes again: results that are cheap to compute, and the attention
            core where no fused kernel computes it (`selective`), or each block (`full`).
        part: the pipeline stage; None: the whole model.
        vocab_multiple: number that divides each rank's rows of embedding and head.
        context_group: the ranks that share each sample, for a causal model (`layers/context.py`).
        seed: seed of the weights, which are a function of (seed, canonical name), the same at any layout.
        device: device of the parameters; None: torch's default.
        dtype: dtype of the parameters; None: torch's default.
        deferred: true if the optimizer gives the parameters memory and values (`LayerOptions`).

    Attributes:
        passes_keys: true if ranks that share samples pass their keys and values round, false if they gather them.
        is_compiled: true if the blocks are compiled.
    """

    def __init__(
        self,
        config: _Config,
        group: Group | None = None,
        *,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        part: ModelPart | None = None,
        vocab_multiple: int = 1,
        context_group: Group | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        deferred: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.part = part or ModelPart()
        ranks = sharing_group(type(self).__name__, group)
        init = Init.normal(config.initializer_range)
        # A layer draws its weight from (seed, name), so that layers may be made in any order and on any rank alone.
        options: LayerOptions = {"group": ranks, "seed": seed, "init": init, "device": device, "dtype": dtype}
        options["deferred"] = deferred
        self.context_group = context_group or Group()
        self.sequence_ranks = ranks.size if sequence_parallel else 1
        in_blocks = replace(execution(), context_group=self.context_group)
        self.passes_keys = in_blocks.passes_keys
        self.is_compiled = in_blocks.compiler is not None and in_blocks.compiler.compiles_blocks
        factory = LayerFactory(ranks, sequence_parallel, recompute, self.part, vocab_multiple, options, in_blocks)
        # Layers outside of blocks, such as BERT's heads, are small: they keep the dtype of their weights.
        with made_with(replace(in_blocks, fp8=False)):
            self.build(config, factory)

    def build(self, config: _Config, factory: LayerFactory) -> None:
        """Make the layers of this part, in the order of the forward pass.

        Gradients are complete in about the reverse of this order, by which the optimizer forms its buckets.
        """
        raise NotImplementedError


def gives_losses(model: nn.Module) -> bool:
    """Return whether a model's forward returns losses; a `ModelPart` without the head gives the next part's input."""
    part = getattr(model, "part", None)
    return part.is_last if isinstance(part, ModelPart) else True


class KeyValueCache:
    """A model's cache of attention keys and values, so that a forward pass computes only those of new tokens.

    A rank keeps the m key and value heads that it holds: 2 · L · B · m · d elements a block in the dtype of the
    activations, or with a window of w < L tokens 2 · w · B · m · d. They are allocated once, by the first forward pass,
    and never grow.

    Args:
        room: L, the largest number of tokens.

    Attributes:
        length: number of tokens that were read.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def seen(self, window: int | None) -> int:
        """Return the number of earlier tokens that the next one sees in a block."""
        return self.length if window is None else min(self.length, window - 1)

    def extend(self, layer: int, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Keep a layer's k and v `[S, B, m, d]` of the next S tokens; returns all that they see: `[seen + S, B, m, d]`.

        Those of one token may be in another order. `length` stays: call `advance` once all layers have the new tokens.

        Raises:
            ValueError: there is no room for the tokens.
        """
        end = self.length + k.shape[0]
        if end > self.room:
            raise ValueError(f"the tokens ({end}) must be at most those that the cache has room for ({self.room})")
        rows = self.room if window is None else min(self.room, window)
        if layer not in self._layers:
            self._layers[layer] = (k.new_empty(rows, *k.shape[1:]), v.new_empty(rows, *v.shape[1:]))
        keys, values = self._layers[layer]
        if end <= rows:
            keys[self.length : end] = k
            values[self.length : end] = v
            return keys[:end], values[:end]  # views: nothing is copied
        # Token p is in row p modulo the window.
        if len(k) == 1:
            row = self.length % rows
            keys[row] = k[0]
            values[row] = v[0]
            return keys, values
        places = torch.arange(self.length - self.seen(window), end, device=k.device)
        earlier = places[: -len(k)] % rows
        k, v = torch.cat((keys[earlier], k)), torch.cat((values[earlier], v))
        kept = places[-rows:] % rows
        keys[kept] = k[-rows:]
        values[kept] = v[-rows:]
        return k, v

    def advance(self, count: int) -> None:
        """Count `count` new tokens."""
        self.length += count

    @property
    def bytes(self) -> int:
        """Bytes that are allocated on this rank, unused room included; 0 before the first forward pass."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)
