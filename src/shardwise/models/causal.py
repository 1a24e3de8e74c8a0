"""The frame of a causal language model: embedding, blocks, a last norm, and the head with its loss.

Shapes: see `models/blocks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from shardwise.config import FamilyConfig
from shardwise.layers.dropout import DropoutKey
from shardwise.layers.embedding import ParallelLMHead
from shardwise.models.blocks import BlockContext, FamilyModel, KeyValueCache, run_blocks
from shardwise.models.masks import AttentionMask, DocumentSizes, Mask, PiecesMask
from shardwise.models.rotary import Rotary

_Config = TypeVar("_Config", bound=FamilyConfig)


class CausalLM(FamilyModel[_Config]):
    """A decoder, whose layers a family makes in `build`."""

    layers: nn.ModuleList
    norm: nn.Module
    lm_head: ParallelLMHead
    rotary: Rotary | None = None  # the rotary tables; None with learned positions
    window_rotary: Rotary | None = None  # those of blocks with a window; None: the same
    # True if `context_group` shares samples, as in training; false if each rank has whole ones.
    shares_samples: bool = True

    def embed(self, ids_SB: Tensor, context: BlockContext, positions_SB: Tensor | None = None) -> Tensor:
        """Token ids `[S, B]` → x; without `positions_SB` the positions are 0 … S-1."""
        raise NotImplementedError

    def hidden(
        self,
        ids_SB: Tensor,
        dropout: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
        x: Tensor | None = None,
        positions_SB: Tensor | None = None,
        starts_SB: Tensor | None = None,
        lengths_B: Tensor | None = None,
        documents: DocumentSizes | None = None,
    ) -> Tensor:
        """Token ids `[S, B]` → final hidden states `[S, B, H]` (`[S/g, B, H]` with sequence parallelism).

        A pipeline stage that is not the last returns the output of its blocks.

        Args:
            dropout: the step's key; None: no dropout.
            cache: keys and values of the earlier tokens; those of these tokens are added to it.
            x: output of the previous pipeline stage; None: this is the first stage.
            positions_SB: position of each token; None: its place in the sequence. Not with a cache.
            starts_SB: first place that each token attends to; None: 0. Not with a cache.
            lengths_B: tokens of each sequence before its padding; None: all. Not with a cache.
            documents: sizes of the documents that `starts_SB` tells apart, for kernels that need them; None: not known.

        Raises:
            ValueError: the cache has no room, or its keys are stale in the longer sequence (`outdates`).
        """
        known = 0 if cache is None else cache.length
        if known and self.outdates(known, known + len(ids_SB)):
            raise ValueError(f"the {known} tokens of the cache must be read again with those that follow")
        length = known + len(ids_SB)
        is_cut = self._cuts_samples
        runs: tuple[range, ...] = (range(known, length),)
        if is_cut:
            runs = self._own_runs(len(ids_SB))
            length = self.context_group.size * len(ids_SB)
            places = torch.cat([torch.arange(run.start, run.stop, device=ids_SB.device) for run in runs])
            if dropout is not None:
                dropout = replace(dropout, places_S=places)
            if positions_SB is None:
                positions_SB = places.unsqueeze(1)
        if x is None:
            key = self._key_of_embedding(dropout) if is_cut else dropout
            x = self.embed(ids_SB, BlockContext(key, cache=cache), positions_SB)
        if starts_SB is not None and x.device.type == "cpu" and not (self.is_compiled or starts_SB.any()):
            starts_SB = None  # samples of one document need no mask
            if positions_SB is not None and torch.equal(positions_SB, positions_SB[:, :1].expand_as(positions_SB)):
                positions_SB = positions_SB[:, :1]  # tables of one column are faster
        tables = self._tables(x, length, positions_SB, lengths_B, known)
        context = BlockContext(dropout, cache=cache, rotary_tables=tables, gathers_keys=is_cut and not self.passes_keys)
        if is_cut and self.context_group.has_parts:
            context = replace(context, parts=self._parts(context, runs, starts_SB, length, x))
        elif is_cut or cache is not None or starts_SB is not None or self._windows != {None}:
            context = replace(context, masks=self._masks(context, runs, starts_SB, length, x, documents))
        x = run_blocks(self.layers, x, context, self.recompute)
        if cache is not None:
            cache.advance(len(ids_SB))  # after all blocks, as each writes at the same length
        if not self.part.is_last:
            return x
        return self._joined_norm(x) if context.parts else self.norm(x)

    def _own_runs(self, length: int) -> tuple[range, ...]:
        from shardwise.layers.context import runs_of_places

        return runs_of_places(length, self.context_group.rank, self.context_group.size, self.context_group.parts)

    def _joined_norm(self, x: Tensor) -> Tensor:
        from shardwise.layers.bitwise.replicated import SequenceParts

        return SequenceParts(self.norm, self.context_group).joined(self.norm, x)

    def _key_of_embedding(self, key: DropoutKey | None) -> DropoutKey | None:
        """Return the key whose places are in the order in which tensor-parallel ranks have the embedding's output.

        With sequence parallelism a rank has a slice of each part of the tokens.
        """
        if key is None or key.places_S is None:
            return key
        by_part = key.places_S.view(self.context_group.parts, self.sequence_ranks, -1)
        return replace(key, places_S=by_part.transpose(0, 1).flatten())

    @property
    def _cuts_samples(self) -> bool:
        """True if this rank, or each part of its tokens, has a part of each sample."""
        return self.shares_samples and (self.context_group.grain or self.context_group.size) > 1

    @cached_property
    def _windows(self) -> set[int | None]:
        """The windows of the blocks; None for those without."""
        return {self.config.window(number) for number in self.part.block_numbers(self.config)}

    def _tables(
        self, x: Tensor, length: int, positions_SB: Tensor | None, lengths_B: Tensor | None, first: int
    ) -> dict[int | None, tuple[Tensor, Tensor]]:
        """Return the rotary tables of the blocks by their windows: cosines and sines of these tokens.

        They are `[S, 1, 1, r/2]`, or `[S, B, 1, r/2]` if samples differ in them. `length` is that of the whole
        sequence. Without `positions_SB` they are its tokens from `first` on.
        """
        tables = {}
        for window in self._windows:
            rotary = self.rotary if window is None or self.window_rotary is None else self.window_rotary
            if rotary is None:
                continue
            of_each = None if lengths_B is None else rotary.tables_of_each(lengths_B.tolist(), length, x)
            cos, sin = of_each or rotary.tables(length, x, first)
            if positions_SB is not None:
                # Row p of column b: the angle of position p in sample b, or in all of them.
                columns_B = torch.arange(max(positions_SB.shape[1], cos.shape[1]), device=positions_SB.device)
                cos, sin = (table.expand(-1, len(columns_B), -1, -1)[positions_SB, columns_B] for table in (cos, sin))
            tables[window] = cos, sin
        return tables

    def _masks(
        self,
        context: BlockContext,
        runs: Sequence[range],
        starts_SB: Tensor | None,
        length: int,
        x: Tensor,
        documents: DocumentSizes | None = None,
    ) -> dict[int | None, Mask | None]:
        """Return the masks of queries at runs of places in a sequence of `length` tokens, in the form of attention.

        Where keys come rank by rank, there is one mask for those of each rank.
        """
        cache = context.cache
        ranks = self.context_group.size if self.passes_keys and self._cuts_samples else 1
        masks: dict[int | None, Mask | None] = {}
        for window in self._windows:
            forgotten = 0 if cache is None else cache.length - cache.seen(window)
            places = tuple(range(run.start - forgotten, run.stop - forgotten) for run in runs)
            mask = AttentionMask(places, starts_SB, window, documents=documents)
            if ranks == 1:
                masks[window] = self._form_of(mask, length - forgotten, x, context)
                continue
            from shardwise.layers.context import runs_of_places

            by_rank = [runs_of_places(mask.queries, rank, ranks) for rank in range(ranks)]
            forms = [self._form_of(replace(mask, key_places=run), length, x, context) for run in by_rank]
            from shardwise.models.ring_attention import RingMask

            masks[window] = RingMask([cast(Mask, form) for form in forms], self.context_group)
        return masks

    def _form_of(self, mask: AttentionMask, keys: int, x: Tensor, context: BlockContext) -> Mask | None:
        form = mask.form(
            x,
            keys=keys,
            head_dim=self.config.head_dim,
            is_compiled=self.is_compiled,
            is_fused=context.dropout is None or not self.config.attention_dropout_p,
            is_cached=context.cache is not None,
        )
        if isinstance(form, PiecesMask):
            from shardwise.models.attention_pieces import define_attention_by_pieces

            define_attention_by_pieces()
        return form

    def _parts(
        self, context: BlockContext, runs: Sequence[range], starts_SB: Tensor | None, length: int, x: Tensor
    ) -> list[BlockContext]:
        """Return the contexts of the parts of this rank's tokens, which have two runs of places each."""
        count = self.context_group.parts
        parts = []
        for number in range(count):
            key = context.dropout
            if isinstance(key, DropoutKey) and key.places_S is not None:
                key = replace(key, places_S=key.places_S.chunk(count)[number])
            part = BlockContext(key, gathers_keys=True)
            starts = None if starts_SB is None else starts_SB.chunk(count)[number]
            masks = self._masks(part, runs[2 * number : 2 * number + 2], starts, length, x)
            parts.append(replace(part, masks=masks))
        return parts

    def forward(
        self,
        ids_SB: Tensor,
        targets_SB: Tensor,
        dropout: DropoutKey | None = None,
        x: Tensor | None = None,
        positions_SB: Tensor | None = None,
        starts_SB: Tensor | None = None,
        lengths_B: Tensor | None = None,
        documents: DocumentSizes | None = None,
    ) -> Tensor:
        """Return the sum of the cross-entropies of the targets that are not -100: a float32 scalar.

        Other arguments are those of `hidden`, whose output a stage that is not the last returns.
        """
        hidden = self.hidden(ids_SB, dropout, None, x, positions_SB, starts_SB, lengths_B, documents)
        if not self.part.is_last:
            return hidden
        return self.lm_head.loss(hidden, targets_SB, context_group=self.context_group if self.shares_samples else None)

    def outdates(self, known: int, length: int) -> bool:
        """Return whether the keys of the first `known` tokens differ in a sequence of `length` tokens.

        They do if rotary angles change with the length: then all tokens must be read in one pass.
        """
        if known == 0 or self.rotary is None:
            return False
        return self.rotary.regime(known) != self.rotary.regime(length)

    def forgets(self, known: int) -> bool:
        """Return whether a cache of `known` tokens lacks some of their keys, so that it cannot go back to fewer."""
        windows = [self.config.window(layer) for layer in range(self.config.num_hidden_layers)]
        return any(window is not None and window < known for window in windows)

    def logits(self, ids_SB: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits `[S, B, V]` over the whole vocabulary, on every rank of the group."""
        logits_SBV: Tensor = self.lm_head(self.hidden(ids_SB, cache=cache))
        return logits_SBV

    def next_logits(self, ids_SB: Tensor, cache: KeyValueCache, x: Tensor | None = None) -> Tensor:
        """Return the logits `[B, V]` of the next token. Sequence parallelism must be off.

        `x` is as in `hidden`, whose output a stage that is not the last returns.
        """
        hidden = self.hidden(ids_SB, cache=cache, x=x)
        if not self.part.is_last:
            return hidden
        # With sequence parallelism the last position would be on the last rank alone.
        logits_1BV: Tensor = self.lm_head(hidden[-1:])
        return logits_1BV[0]
