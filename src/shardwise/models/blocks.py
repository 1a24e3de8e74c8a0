"""What the families share beside attention: how layers are made, the plain MLP, the frame of a model, its stages.

Legend, per rank: S sequence, B batch, H hidden, V vocabulary, g tensor-parallel ranks, n heads held here, d head width.
Between blocks the residual stream is x `[S, B, H]`, or `[S/g, B, H]` with sequence parallelism.

The parts of a model that are called one after another, each with its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.config import FamilyConfig, Recompute
from shardwise.config.stages import Stage
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Init, share
from shardwise.layers.arguments import sharing_group
from shardwise.layers.dropout import AnyKey, Dropout
from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead, ReplicatedEmbedding
from shardwise.layers.linear import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    LayerOptions,
    LinearOptions,
    RowParallelLinear,
)
from shardwise.layers.norm import LayerNorm, QueryKeyNorm, RMSNorm
from shardwise.models.key_value_cache import KeyValueCache

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_Config = TypeVar("_Config", bound=FamilyConfig)
_Norm = LayerNorm | RMSNorm

ATTENTION, AFTER_ATTENTION, AFTER_MLP, INSIDE_MLP = range(4)
"""Sites of dropout in a block. The embedding is a layer of its own, before the first."""
EMBEDDING = -1

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class Part:
    """The part of a model that one pipeline stage has; by default all of it.

    Attributes:
        layers: its blocks; None: all.
        is_first, is_last: whether it has the embedding, and the head.
        ends: the ranks with the first and the last stage, if they are two.
        embeddings: those that this rank's stages have already, by name: a rank with both ends has a tied one once.
    """

    layers: range | None = None
    is_first: bool = True
    is_last: bool = True
    ends: Group = field(default_factory=Group)
    embeddings: dict[str, ParallelEmbedding] = field(default_factory=dict)


@dataclass(frozen=True)
class Maker:
    """Makes the layers of a model: it has all their arguments beside the configuration.

    Attributes:
        recompute: what the backward pass computes again from its input: the attention core (`selective`) or each block
            (`full`).
    """

    group: Group
    sequence_parallel: bool
    recompute: Recompute
    part: Part
    vocab_multiple: int
    options: LayerOptions

    def layers(self, config: FamilyConfig) -> range:
        """The blocks that are to be made."""
        return self.part.layers if self.part.layers is not None else range(config.num_hidden_layers)

    def has_embedding(self, config: FamilyConfig) -> bool:
        """Whether this part has the word embedding: for its input, or as the head's weight."""
        return self.part.is_first or (self.part.is_last and config.tie_word_embeddings)

    def word_embedding(self, config: FamilyConfig, name: str, padding_idx: int | None = None) -> ParallelEmbedding:
        """Ids → x. Where both ends of a pipeline hold a tied one, its gradient is partial over them."""
        if name in self.part.embeddings:
            return self.part.embeddings[name]
        embedding = self.part.embeddings[name] = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            padding_idx,
            sequence_parallel_enabled=self.sequence_parallel,
            row_multiple=self.vocab_multiple,
            name=name,
            **self.options,
        )
        if config.tie_word_embeddings and self.part.ends.size > 1:
            share(embedding.weight, self.part.ends)
        return embedding

    def small_embedding(self, config: FamilyConfig, name: str, rows: int) -> ReplicatedEmbedding:
        """Positions or token types → what is added to x."""
        return ReplicatedEmbedding(
            rows, config.hidden_size, sequence_parallel_enabled=self.sequence_parallel, name=name, **self.options
        )

    def query_key_value(
        self, config: FamilyConfig, names: Sequence[str], *, bias: bool = True, transposed: bool = False
    ) -> GQAQKVColumnParallelLinear:
        """x → Q, K and V, one after the other. `names` of their canonical layers; three times the same if it is one."""
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
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

    def query_key_norm(self, config: FamilyConfig, names: tuple[str, str]) -> QueryKeyNorm | None:
        """q and k → both normalised; None in families that do not."""
        if config.query_key_norm is None:
            return None
        heads = config.num_attention_heads, config.num_key_value_heads
        return QueryKeyNorm(
            (heads[0] * config.head_dim, heads[1] * config.head_dim),
            config.norm_eps,
            head_dim=config.head_dim,
            over=config.query_key_norm,
            names=names,
            **self.options,
        )

    def norm(self, config: FamilyConfig, name: str, kind: type[_Norm] = LayerNorm) -> _Norm:
        """x → x normalised."""
        return kind(
            config.hidden_size,
            config.norm_eps,
            sequence_parallel_enabled=self.sequence_parallel,
            name=name,
            **self.options,
        )

    def dropout(self, p: float, layer: int, site: int) -> Dropout:
        """Dropout on the residual stream."""
        return Dropout(p, layer=layer, site=site, group=self.group, sequence_parallel_enabled=self.sequence_parallel)

    def head(self, config: FamilyConfig, name: str, embedding: str) -> ParallelLMHead:
        """x → logits or losses. A tied head has the weight of the embedding named `embedding`."""
        tied = self.part.embeddings[embedding].weight if config.tie_word_embeddings else None
        return ParallelLMHead(
            config.hidden_size,
            config.vocab_size,
            tied_weight=tied,
            sequence_parallel_enabled=self.sequence_parallel,
            row_multiple=self.vocab_multiple,
            name=name,
            **self.options,
        )


@dataclass(frozen=True)
class Context:
    """What all blocks of one forward pass share.

    Attributes:
        dropout: the step's key; None: no dropout.
        mask: keys that may be attended to, `[B, 1, 1, S]`, or `[S, L]` for the last S queries of L keys; or a number
            added to each score, `[B, 1, S, S]`; None: all keys, or in a causal model those that are not later.
        cache: keys and values of earlier tokens.
        turns: the rotary tables of these tokens; None in models with learned positions.
        blocks, starts_SB: which blocks of keys each block of queries attends to, or where the document of each token
            starts, in place of a mask (`documents.py`).
    """

    dropout: AnyKey | None = None
    mask: Tensor | None = None
    cache: KeyValueCache | None = None
    turns: tuple[Tensor, Tensor] | None = None
    blocks: BlockMask | None = None
    starts_SB: Tensor | None = None

    @property
    def first(self) -> int:
        """Position of the first token of this pass."""
        return 0 if self.cache is None else self.cache.length


class MLP(nn.Module):
    """`down(dropout(act(up(x))))`. names: canonical layers of up and down."""

    def __init__(
        self,
        config: FamilyConfig,
        layer: int,
        make: Maker,
        names: tuple[str, str],
        *,
        transposed: bool = False,
        down_init: Init | None = None,
    ) -> None:
        super().__init__()
        options = LinearOptions(**make.options, transposed=transposed)
        self.up = ColumnParallelLinear(
            config.hidden_size,
            config.intermediate_size,
            gather_output=False,
            sequence_parallel_enabled=make.sequence_parallel,
            name=names[0],
            **options,
        )
        self.act = ACTIVATIONS[config.activation]
        self.dropout = Dropout(
            config.ffn_dropout_p, layer=layer, site=INSIDE_MLP, group=make.group, input_is_parallel=True
        )
        down_options = LinearOptions(**{**options, "init": down_init}) if down_init is not None else options
        self.down = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            input_is_parallel=True,
            sequence_parallel_enabled=make.sequence_parallel,
            name=names[1],
            **down_options,
        )

    def inner(self, x: Tensor, context: Context) -> Tensor:
        """What the second projection takes: `[S, B, F/g]`."""
        inner: Tensor = self.dropout(self.act(self.up(x)), context.dropout)
        return inner

    def forward(self, x: Tensor, context: Context) -> Tensor:
        out: Tensor = self.down(self.inner(x, context))
        return out


def run_blocks(blocks: nn.ModuleList, x: Tensor, context: Context, recompute: Recompute) -> Tensor:
    """x → all blocks → x; with `full` recompute only each block's input is kept for the backward pass.

    Dropout masks depend on the context's key and not on a generator's state, so recomputed masks are the same.
    """
    for block in blocks:
        if recompute == "full" and torch.is_grad_enabled():
            x = checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False)
        else:
            x = block(x, context)
    return x


class Family(nn.Module, Generic[_Config]):
    """A model of one architecture.

    Args:
        config: sizes by their Hugging Face names.
        group: the tensor-parallel ranks.
        sequence_parallel: whether the residual stream is cut along the sequence between blocks.
        recompute: what the backward pass computes again (`Maker`).
        part: the pipeline stage; None: the whole model.
        vocab_multiple: each rank's rows of embedding and head are a multiple of it.
        seed: the weights are a function of (seed, canonical name), the same at any layout.
    """

    def __init__(
        self,
        config: _Config,
        group: Group | None = None,
        *,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        part: Part | None = None,
        vocab_multiple: int = 1,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.recompute, self.part = config, recompute, part or Part()
        ranks = sharing_group(type(self).__name__, group)
        init = Init.normal(config.initializer_range)
        options: LayerOptions = {"group": ranks, "seed": seed, "init": init, "device": device, "dtype": dtype}
        self.build(config, Maker(ranks, sequence_parallel, recompute, self.part, vocab_multiple, options))

    def build(self, config: _Config, make: Maker) -> None:
        """Make the layers of this part, in the order of the forward pass."""
        raise NotImplementedError


def gives_losses(model: nn.Module) -> bool:
    """Whether a model returns losses; if not, it returns the input of the next pipeline stage."""
    return model.part.is_last if isinstance(model, Family) else True


class Stages(nn.ModuleList):
    """The pipeline stages of one rank, in the order of the model; each is a `Family` built as a `Part`.

    Attributes:
        plan: the place of each stage in the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[Stage] = []

    def add(self, stage: Stage, model: nn.Module) -> None:
        """Append the next stage."""
        self.plan.append(stage)
        self.append(model)

    def pairs(self) -> Iterator[tuple[Stage, nn.Module]]:
        """Each stage with its model."""
        return zip(self.plan, self, strict=True)


def units(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """The model, its pipeline stages, its blocks and its heads, each with the parameters that no unit inside it has.

    A call of a unit reads no other parameters than these before it calls the units inside it. (A smaller module may be
    used by other methods than its forward, so that a hook of its forward comes too late.)
    """
    inside = [
        *(child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module),
        *(module for module in model.modules() if isinstance(module, ParallelLMHead)),
    ]
    found = dict.fromkeys([model, *inside])
    return {unit: list(_own(unit, found.keys() - {unit})) for unit in found}


def _own(module: nn.Module, others: set[nn.Module]) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in others:
            yield from _own(child, others)
