"""Spellings of the names of weights in published checkpoints: one small table per family.

Canonical names are those that `transformers` writes today. Older files, files of a model without its head, and files
that hold buffers or a tied weight twice are read through these tables; nothing else is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from shardwise.config import DecoderConfig
from shardwise.config.model import FAMILIES


@dataclass(frozen=True)
class Spelling:
    """What a family's checkpoints may hold beside the canonical names.

    Attributes:
        base: prefix that a file lacks when it was written from the model without its head.
        heads: prefixes of names outside of `base`, which such a file may still have.
        renamed: pattern and replacement of other spellings.
        buffers: names that hold no weight, but a mask or a table that the model computes.
        tied: a weight under a second name, where the model has it once: name → canonical name.
    """

    base: str = ""
    heads: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    buffers: str = r"(?!)"
    tied: dict[str, str] = field(default_factory=dict)

    def canonical(self, stored: Collection[str], ours: Collection[str]) -> dict[str, str]:
        """Names in a file → the canonical names that they stand for. Buffers are left out.

        `ours`: the model's canonical names. A name that stands for nothing comes back under itself.
        """
        bare = bool(self.base) and not any(name.startswith(self.base) for name in stored)
        names = {}
        for name in stored:
            whole = self.base + name if bare and not name.startswith(self.heads) else name
            for pattern, replacement in self.renamed:
                whole = re.sub(pattern, replacement, whole)
            if re.fullmatch(self.buffers, whole):
                continue
            if whole not in ours and self.tied.get(whole) in ours:
                whole = self.tied[whole]
            names[name] = whole if whole in ours else name
        return names


_DECODER = Spelling(
    base="model.",
    heads=("lm_head.",),
    buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
_SPELLINGS = {
    # Llama, and those that differ from it by facts.
    **{name: _DECODER for name, family in FAMILIES.items() if issubclass(family, DecoderConfig)},
    # OpenAI's weights on the hub have no prefix, and each layer's causal mask.
    "gpt": Spelling(
        base="transformer.",
        heads=("lm_head.",),
        buffers=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
        tied={"lm_head.weight": "transformer.wte.weight"},
    ),
    # transformers 5 names the head lm_head in memory, and embed_out in files as version 4 does.
    "gpt_neox": Spelling(
        base="gpt_neox.",
        heads=("embed_out.", "lm_head."),
        renamed=((r"^lm_head\.", "embed_out."),),
        buffers=r"gpt_neox\.(layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq)",
        tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
    ),
    # Google's weights were TensorFlow's: gamma and beta. The decoder is the word embedding, and its bias the head's.
    "bert": Spelling(
        base="bert.",
        heads=("cls.",),
        renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        buffers=r"bert\.embeddings\.(position_ids|token_type_ids)",
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    ),
}


def spelling(family: str) -> Spelling:
    """The family's table; a user's own model has none: its names are its own."""
    return _SPELLINGS.get(family, Spelling())
