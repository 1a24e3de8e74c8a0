"""GPT-NeoX (arXiv:2204.06745) and Pythia: rotary positions on a part of each head, attention and MLP in parallel.

The canonical tensors are Hugging Face's: Q, K and V are one tensor, head by head `[heads, 3, head_dim]`, which a rank
keeps as it is for its own heads. Shapes: see `models/blocks.py`.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from shardwise.config import GPTNeoXConfig
from shardwise.distributed.placement import mark_heads
from shardwise.layers.linear import row_parallel_sum
from shardwise.layers.recompute import compose
from shardwise.models.attention import Attention, Block
from shardwise.models.blocks import AFTER_ATTENTION, AFTER_MLP, EMBEDDING, MLP, BlockContext, LayerFactory
from shardwise.models.causal import CausalLM
from shardwise.models.rotary import Rotary


class InterleavedAttention(Attention):
    """Attention whose Q, K and V lie head by head in one tensor: the layer's output is `[…, heads, 3, head_dim]`."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # A rank's rows are those of its heads, as the canonical rows are ordered by head.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        return q, k, v


class GPTNeoXBlock(Block):
    """`x + attention(ln_1(x)) + mlp(ln_2(x))` with a parallel residual, else one after the other as in GPT-2.

    With a parallel residual whose parts have no dropout of their own, one collective sums the outputs of both
    row-parallel layers.
    """

    def __init__(self, config: GPTNeoXConfig, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        name = f"gpt_neox.layers.{layer}"
        outputs = 3 * config.num_attention_heads * config.head_dim
        qkv = factory.column(config, outputs, f"{name}.attention.query_key_value", bias=config.attention_bias)
        mark_heads(qkv.weight, config.head_dim, maps=3)
        self.drops_normed = factory.drops_normed
        self.parallel_residual = config.use_parallel_residual
        self.sums_together = self.parallel_residual and not config.hidden_dropout_p
        self.input_layernorm = factory.norm(config, f"{name}.input_layernorm")
        self.attention = InterleavedAttention(
            config, layer, factory, qkv, f"{name}.attention.dense", bias=config.attention_bias, rotates=True
        )
        self.post_attention_layernorm = factory.norm(config, f"{name}.post_attention_layernorm")
        self.attention_dropout = factory.dropout(config.hidden_dropout_p, layer, AFTER_ATTENTION)
        self.mlp = MLP(config, layer, factory, (f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"))
        self.mlp_dropout = factory.dropout(config.hidden_dropout_p, layer, AFTER_MLP)

    def before_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        return compose(self.attention.project, self.input_layernorm, x, drops=self.drops_normed)

    def behind_attention(self, x: Tensor, attended: Tensor, context: BlockContext) -> Tensor:
        if self.sums_together:
            return x + self._attention_and_mlp(x, attended, context)
        mlp = partial(self.mlp, context=context)
        attended = self.attention_dropout(self.attention.out(attended), context.dropout)
        mlp_input = x if self.parallel_residual else x + attended
        added = compose(mlp, self.post_attention_layernorm, mlp_input, drops=self.drops_normed)
        added = self.mlp_dropout(added, context.dropout)
        out: Tensor = x + attended + added
        return out

    def _attention_and_mlp(self, x: Tensor, attended: Tensor, context: BlockContext) -> Tensor:
        def summed(activated: Tensor) -> Tensor:
            return row_parallel_sum((self.attention.out, attended), (self.mlp.down, activated))

        mlp = partial(self.mlp.feed, context=context, then=summed)
        return compose(mlp, self.post_attention_layernorm, x, drops=self.drops_normed)


class GPTNeoX(CausalLM[GPTNeoXConfig]):
    """The causal language model."""

    def build(self, config: GPTNeoXConfig, factory: LayerFactory) -> None:
        self.rotary = Rotary(config)
        if factory.has_embedding(config):
            self.embed_in = factory.word_embedding(config, "gpt_neox.embed_in")
        if factory.part.is_first:
            self.dropout = factory.dropout(config.embedding_dropout_p, EMBEDDING, 0)
        self.layers = factory.blocks(config, GPTNeoXBlock)
        if factory.part.is_last:
            self.norm = factory.norm(config, "gpt_neox.final_layer_norm")
            self.lm_head = factory.head(config, "embed_out", "gpt_neox.embed_in")

    def embed(self, ids_SB: Tensor, context: BlockContext, positions_SB: Tensor | None = None) -> Tensor:
        x: Tensor = self.dropout(self.embed_in(ids_SB), context.dropout)
        return x
