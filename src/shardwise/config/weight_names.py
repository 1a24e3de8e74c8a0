"""Names of weights in published checkpoints, where they differ from the canonical names.

Canonical names are those that `transformers` writes today. Older files, files of a model without its head, and files
that hold buffers or a tied weight twice are read through a family's `WeightNames`; nothing else is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WeightNames:
    """The names that checkpoints of a family may hold beside the canonical ones.

    Attributes:
        base: prefix that a file lacks if it was written from the model without its head.
        heads: prefixes of names outside of `base`, which such a file may still have.
        renamed: pairs of a pattern of another spelling and its replacement.
        buffers: pattern of names that hold no weight, but a mask or a table that the model computes.
        tied: second name of a weight that the model has once → its canonical name.
    """

    base: str = ""
    heads: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    buffers: str = r"(?!)"  # matches no name
    tied: dict[str, str] = field(default_factory=dict)

    def canonical(self, stored: Collection[str], canonical_names: Collection[str]) -> dict[str, str]:
        """Map the names in a file to the model's canonical names; buffers are left out.

        A name that stands for none of `canonical_names` is mapped to itself.
        """
        lacks_base = bool(self.base) and not any(name.startswith(self.base) for name in stored)
        names = {}
        for name in stored:
            full_name = name
            if lacks_base and not name.startswith(self.heads):
                full_name = self.base + name
            for pattern, replacement in self.renamed:
                full_name = re.sub(pattern, replacement, full_name)
            if re.fullmatch(self.buffers, full_name):
                continue
            if full_name not in canonical_names and self.tied.get(full_name) in canonical_names:
                full_name = self.tied[full_name]
            names[name] = full_name if full_name in canonical_names else name
        return names
