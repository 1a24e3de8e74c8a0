"""GPT-2 and GPT-3: pre-norm blocks with learned positions, biases everywhere and dropout.

"Language Models are Unsupervised Multitask Learners" (Radford et al. 2019, section 2.3) and arXiv:2005.14165. The
canonical tensors are those of Hugging Face's GPT-2, whose weights are `[in, out]` and whose Q, K and V are one tensor.
Shapes: see `models/blocks.py`.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from shardwise.config import GPTConfig
from shardwise.distributed.placement import Init
from shardwise.layers.recompute import compose
from shardwise.models.attention import Attention, Block
from shardwise.models.blocks import AFTER_ATTENTION, AFTER_MLP, EMBEDDING, MLP, BlockContext, LayerFactory
from shardwise.models.causal import CausalLM


class GPTBlock(Block):
    """`x + dropout(attention(ln_1(x)))`, then `x + dropout(mlp(ln_2(x)))`."""

    attention_name = "attn"

    def __init__(self, config: GPTConfig, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        name = f"transformer.h.{layer}"
        qkv = factory.query_key_value(config, 3 * (f"{name}.attn.c_attn",), transposed=True)
        # GPT-2 scales the weights of a block's two terms of the residual stream by 1 / √(number of all terms).
        scaled = Init.normal(config.initializer_range / math.sqrt(2 * config.num_hidden_layers))
        self.drops_normed = factory.drops_normed
        self.ln_1 = factory.norm(config, f"{name}.ln_1")
        self.attn = Attention(config, layer, factory, qkv, f"{name}.attn.c_proj", transposed=True, out_init=scaled)
        self.attn_dropout = factory.dropout(config.hidden_dropout_p, layer, AFTER_ATTENTION)
        self.ln_2 = factory.norm(config, f"{name}.ln_2")
        self.mlp = MLP(
            config, layer, factory, (f"{name}.mlp.c_fc", f"{name}.mlp.c_proj"), transposed=True, down_init=scaled
        )
        self.mlp_dropout = factory.dropout(config.hidden_dropout_p, layer, AFTER_MLP)

    def before_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        return compose(self.attn.project, self.ln_1, x, drops=self.drops_normed)

    def behind_attention(self, x: Tensor, attended: Tensor, context: BlockContext) -> Tensor:
        mlp = partial(self.mlp, context=context)
        x = x + self.attn_dropout(self.attn.out(attended), context.dropout)
        added = compose(mlp, self.ln_2, x, drops=self.drops_normed)
        out: Tensor = x + self.mlp_dropout(added, context.dropout)
        return out


class GPT(CausalLM[GPTConfig]):
    """The causal language model."""

    def build(self, config: GPTConfig, factory: LayerFactory) -> None:
        if factory.has_embedding(config):
            self.wte = factory.word_embedding(config, "transformer.wte")
        if factory.part.is_first:
            self.wpe = factory.small_embedding(config, "transformer.wpe", config.max_position_embeddings)
            self.dropout = factory.dropout(config.embedding_dropout_p, EMBEDDING, 0)
        self.layers = factory.blocks(config, GPTBlock)
        if factory.part.is_last:
            self.norm = factory.norm(config, "transformer.ln_f")
            self.lm_head = factory.head(config, "lm_head", "transformer.wte")

    def embed(self, ids_SB: Tensor, context: BlockContext, positions_SB: Tensor | None = None) -> Tensor:
        if positions_SB is None:
            end = context.first_position + ids_SB.shape[0]
            positions_SB = torch.arange(context.first_position, end, device=ids_SB.device).unsqueeze(1)
        x: Tensor = self.dropout(self.wte(ids_SB) + self.wpe(positions_SB), context.dropout)
        return x
