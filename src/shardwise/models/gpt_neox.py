"""GPT-NeoX (arXiv:2204.06745) and Pythia: rotary positions on a part of each head, attention and MLP side by side.

The canonical tensors are Hugging Face's: Q, K and V are one tensor, head by head `[heads, 3, head_dim]`, which a rank
keeps as it is for its own heads. Shapes: see `models/blocks.py`.
"""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.config import GPTNeoXConfig
from shardwise.models.blocks import (
    AFTER_ATTENTION,
    AFTER_MLP,
    EMBEDDING,
    MLP,
    Attention,
    CausalLM,
    Context,
    FamilyConfig,
    Plan,
)
from shardwise.models.rotary import Rotary
from shardwise.parallel import ColumnParallelLinear
from shardwise.parallel.linear import LinearOptions


class InterleavedAttention(Attention):
    """Attention whose Q, K and V lie head by head in one tensor."""

    def _make_qkv(
        self,
        config: FamilyConfig,
        sizes: tuple[int, int],
        names: tuple[str, ...],
        bias: bool,
        plan: Plan,
        options: LinearOptions,
    ) -> nn.Module:
        return ColumnParallelLinear(
            config.hidden_size,
            sizes[0] + 2 * sizes[1],
            bias=bias,
            gather_output=False,
            sequence_parallel_enabled=plan.sequence_parallel,
            name=names[0],
            **options,
        )

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        return q, k, v


class Block(nn.Module):
    """`x + attention(ln_1(x)) + mlp(ln_2(x))` with a parallel residual, else one after the other as in GPT-2.

    Side by side, without dropout between them, the two row-parallel layers leave their region by one collective.
    """

    def __init__(self, config: GPTNeoXConfig, layer: int, rotary: Rotary, plan: Plan) -> None:
        super().__init__()
        name = f"gpt_neox.layers.{layer}"
        qkv, out = f"{name}.attention.query_key_value", f"{name}.attention.dense"
        self.parallel = config.use_parallel_residual
        self.joined = self.parallel and not config.hidden_dropout_p
        self.input_layernorm = plan.norm(config, f"{name}.input_layernorm")
        self.post_attention_layernorm = plan.norm(config, f"{name}.post_attention_layernorm")
        self.attention = InterleavedAttention(
            config, layer, plan, (qkv, qkv, qkv, out), bias=config.attention_bias, rotary=rotary
        )
        self.attention_dropout = plan.dropout(config.hidden_dropout_p, layer, AFTER_ATTENTION)
        self.mlp = MLP(config, plan, (f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"))
        self.mlp_dropout = plan.dropout(config.hidden_dropout_p, layer, AFTER_MLP)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.joined:
            return x + self._side_by_side(x, context)
        attended = self.attention_dropout(self.attention(self.input_layernorm(x), context), context.dropout)
        before_mlp = x if self.parallel else x + attended
        added = self.mlp_dropout(self.mlp(self.post_attention_layernorm(before_mlp)), context.dropout)
        out: Tensor = x + attended + added
        return out

    def _side_by_side(self, x: Tensor, context: Context) -> Tensor:
        attention, mlp = self.attention, self.mlp
        attended = attention.out.multiply(attention.inner(self.input_layernorm(x), context))
        partial = attended + mlp.down.multiply(mlp.inner(self.post_attention_layernorm(x)))
        y = attention.out.finish(partial)
        return y + mlp.down.bias if mlp.down.bias is not None else y


class GPTNeoX(CausalLM[GPTNeoXConfig]):
    """The causal language model."""

    def build(self, config: GPTNeoXConfig, plan: Plan) -> None:
        rotary = Rotary(config)
        self.embed_in = plan.word_embedding(config, "gpt_neox.embed_in")
        self.dropout = plan.dropout(config.embedding_dropout_p, EMBEDDING, 0)
        self.layers = nn.ModuleList(Block(config, i, rotary, plan) for i in range(config.num_hidden_layers))
        self.norm = plan.norm(config, "gpt_neox.final_layer_norm")
        self.lm_head = plan.head(config, "embed_out", self.embed_in)

    def embed(self, ids_SB: Tensor, context: Context) -> Tensor:
        x: Tensor = self.dropout(self.embed_in(ids_SB), context.dropout)
        return x
