"""BERT (arXiv:1810.04805): post-norm bidirectional blocks, masked language modelling and next-sentence prediction.

Shapes: see `models/blocks.py`; P is the largest number of predicted positions in a sequence.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import BertConfig
from shardwise.distributed import collectives
from shardwise.layers.dropout import DropoutKey
from shardwise.layers.embedding import ParallelLMHead
from shardwise.layers.linear import ColumnParallelLinear, ReplicatedLinear
from shardwise.layers.loss import IGNORE_INDEX
from shardwise.layers.norm import LayerNorm
from shardwise.models.attention import Attention, Block
from shardwise.models.blocks import (
    ACTIVATIONS,
    AFTER_ATTENTION,
    AFTER_MLP,
    EMBEDDING,
    MLP,
    BlockContext,
    FamilyModel,
    LayerFactory,
    run_blocks,
)

WORDS = "bert.embeddings.word_embeddings"
"""Name of the word embedding, whose weight the decoder uses too."""


class Embeddings(nn.Module):
    """`dropout(norm(word + position + token type))`."""

    def __init__(self, config: BertConfig, factory: LayerFactory) -> None:
        super().__init__()
        name = "bert.embeddings"
        self.word_embeddings = factory.word_embedding(config, WORDS, config.pad_token_id)
        self.position_embeddings = factory.small_embedding(
            config, f"{name}.position_embeddings", config.max_position_embeddings
        )
        self.token_type_embeddings = factory.small_embedding(
            config, f"{name}.token_type_embeddings", config.type_vocab_size
        )
        self.norm = factory.norm(config, f"{name}.LayerNorm")
        self.dropout = factory.dropout(config.embedding_dropout_p, EMBEDDING, 0)

    def forward(self, ids_SB: Tensor, token_types_SB: Tensor, key: DropoutKey | None) -> Tensor:
        positions_S1 = torch.arange(ids_SB.shape[0], device=ids_SB.device).unsqueeze(1)
        x = self.word_embeddings(ids_SB) + self.token_type_embeddings(token_types_SB)
        return cast(Tensor, self.dropout(self.norm(x + self.position_embeddings(positions_S1)), key))


class BertBlock(Block):
    """`norm(x + dropout(attention(x)))`, then `norm(x + dropout(mlp(x)))`."""

    def __init__(self, config: BertConfig, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        name = f"bert.encoder.layer.{layer}"
        qkv = factory.query_key_value(config, [f"{name}.attention.self.{part}" for part in ("query", "key", "value")])
        self.attention = Attention(config, layer, factory, qkv, f"{name}.attention.output.dense")
        self.attention_dropout = factory.dropout(config.hidden_dropout_p, layer, AFTER_ATTENTION)
        self.attention_norm = factory.norm(config, f"{name}.attention.output.LayerNorm")
        self.mlp = MLP(config, layer, factory, (f"{name}.intermediate.dense", f"{name}.output.dense"))
        self.mlp_dropout = factory.dropout(config.hidden_dropout_p, layer, AFTER_MLP)
        self.mlp_norm = factory.norm(config, f"{name}.output.LayerNorm")

    def before_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.attention.project(x)

    def behind_attention(self, x: Tensor, attended: Tensor, context: BlockContext) -> Tensor:
        x = self.attention_norm(x + self.attention_dropout(self.attention.out(attended), context.dropout))
        return cast(Tensor, self.mlp_norm(x + self.mlp_dropout(self.mlp(x, context), context.dropout)))


class Heads(nn.Module):
    """Masked-token and next-sentence prediction.

    The first layer of both is cut along its outputs. The layers after it are small, and every rank computes them whole,
    but for the decoder. That is cut along the vocabulary: it has the embedding's weight and a bias of its own.
    """

    def __init__(self, config: BertConfig, factory: LayerFactory) -> None:
        super().__init__()
        embedding = factory.word_embedding(config, WORDS, config.pad_token_id)
        hidden = config.hidden_size
        options = factory.options
        self.group = factory.group
        self.sequence_parallel = factory.sequence_parallel
        self.act = ACTIVATIONS[config.activation]
        self.pooler = ColumnParallelLinear(hidden, hidden, name="bert.pooler.dense", **options)
        self.transform = ColumnParallelLinear(hidden, hidden, name="cls.predictions.transform.dense", **options)
        self.norm = LayerNorm(hidden, config.norm_eps, name="cls.predictions.transform.LayerNorm", **options)
        self.decoder = ParallelLMHead(
            hidden,
            config.vocab_size,
            tied_weight=embedding.weight,
            bias_name="cls.predictions.bias",
            name="cls.predictions.decoder",
            **options,
        )
        self.seq_relationship = ReplicatedLinear(hidden, 2, name="cls.seq_relationship", **options)

    def enter(self, x: Tensor) -> Tensor:
        """The encoder's output, which may be cut along the sequence → the whole, `[S, B, H]`, on every rank."""
        return collectives.gather_or_copy(x, self.group, sequence_parallel=self.sequence_parallel)

    def predictions(self, rows: Tensor) -> Tensor:
        """Return the input of the decoder, `norm(act(transform(rows)))`; rows `[…, H]` as `enter` returns them."""
        transformed = self.transform.finish(self.transform.multiply(rows))
        # Whole on every rank: no layout changes its shape, and so its bits.
        return cast(Tensor, self.norm(self.act(transformed)))

    def relationship(self, first_BH: Tensor) -> Tensor:
        """Return logits `[B, 2]` of "B follows A" and "it does not"; takes the first position as `enter` returns it."""
        pooled = torch.tanh(self.pooler.finish(self.pooler.multiply(first_BH)))
        return cast(Tensor, self.seq_relationship(pooled))


class Bert(FamilyModel[BertConfig]):
    """The model with its two pretraining objectives."""

    def build(self, config: BertConfig, factory: LayerFactory) -> None:
        if factory.part.is_first:
            self.embeddings = Embeddings(config, factory)
        self.layers = factory.blocks(config, BertBlock)
        if factory.part.is_last:
            self.heads = Heads(config, factory)

    def hidden(
        self,
        ids_SB: Tensor,
        token_types_SB: Tensor,
        mask_SB: Tensor,
        dropout: DropoutKey | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states `[S, B, H]`, whole on every rank; from an earlier stage its blocks' output.

        Args:
            ids_SB: token ids.
            token_types_SB: segment of each token, 0 or 1.
            mask_SB: 1 for a token, 0 for padding.
            dropout: the step's key; None: no dropout.
            x: output of the previous pipeline stage; None: this is the first stage.
        """
        # One mask for all heads and all queries: padding is seen by no token.
        mask_B11S = mask_SB.t().bool()[:, None, None, :]
        context = BlockContext(dropout, {None: mask_B11S})
        if x is None:
            x = self.embeddings(ids_SB, token_types_SB, dropout)
        x = run_blocks(self.layers, x, context, self.recompute)
        return self.heads.enter(x) if self.part.is_last else x

    def forward(
        self,
        ids_SB: Tensor,
        token_types_SB: Tensor,
        mask_SB: Tensor,
        positions_PB: Tensor,
        targets_PB: Tensor,
        next_sentence_B: Tensor,
        dropout: DropoutKey | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return the sums of the losses of masked tokens and of sentence pairs, over counted targets: float32 `[2]`.

        A stage that is not the last returns the result of `hidden`. Other arguments are those of `hidden`.

        Args:
            positions_PB: positions of the predicted tokens.
            targets_PB: the tokens at these positions; -100: not counted.
            next_sentence_B: 0 if the second sentence follows the first, 1 if it is a random one; -100: not counted.
        """
        x_SBH = self.hidden(ids_SB, token_types_SB, mask_SB, dropout, x)
        if not self.part.is_last:
            return x_SBH
        return self._losses(*self._states(x_SBH, positions_PB), targets_PB, next_sentence_B)

    def _states(self, x_SBH: Tensor, positions_PB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the decoder, `[P, B, H]`, and of the pooler, `[B, H]`."""
        rows_PBH = x_SBH.gather(0, positions_PB.unsqueeze(-1).expand(-1, -1, x_SBH.shape[-1]))
        return self.heads.predictions(rows_PBH), x_SBH[0]

    def _losses(self, rows_PBH: Tensor, first_BH: Tensor, targets_PB: Tensor, next_sentence_B: Tensor) -> Tensor:
        masked = self.heads.decoder.loss(rows_PBH, targets_PB)
        pairs_B2 = self.heads.relationship(first_BH).float()
        pairs = F.cross_entropy(pairs_B2, next_sentence_B, ignore_index=IGNORE_INDEX, reduction="sum")
        return torch.stack((masked, pairs))

    def scores(
        self,
        ids_SB: Tensor,
        token_types_SB: Tensor,
        mask_SB: Tensor,
        positions_PB: Tensor,
        targets_PB: Tensor,
        next_sentence_B: Tensor,
        x: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of `forward`, `[2]`, and the number of right predictions of each objective, `[2]`.

        Only the last stage of a pipeline has this method; its arguments are those of `forward`.
        """
        rows_PBH, first_BH = self._states(self.hidden(ids_SB, token_types_SB, mask_SB, x=x), positions_PB)
        losses = self._losses(rows_PBH, first_BH, targets_PB, next_sentence_B)
        masked = (self.heads.decoder.likeliest(rows_PBH) == targets_PB).sum()
        pairs = (self.heads.relationship(first_BH).argmax(dim=-1) == next_sentence_B).sum()
        return losses, torch.stack((masked, pairs))

    def logits(self, ids_SB: Tensor, token_types_SB: Tensor, mask_SB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits `[S, B, V]` of all positions and `[B, 2]` of the sentence pairs, on every rank."""
        x_SBH = self.hidden(ids_SB, token_types_SB, mask_SB)
        return self.heads.decoder(self.heads.predictions(x_SBH)), self.heads.relationship(x_SBH[0])
