"""Rows of the vocabulary on a rank, and sizes of the chunks in which large intermediate tensors are computed."""

from __future__ import annotations

LOSS_CHUNK_ELEMENTS_CPU = 2**21
"""Logits that the chunked loss holds at once on a CPU: 8 MiB, about what its caches keep."""

LOSS_CHUNK_ELEMENTS_ACCELERATOR = 2**27
"""Logits of the same on an accelerator: 512 MiB, large enough that its matrix products stay at full rate."""

LOSS_CHUNK_TOKENS = 256
"""The fewest tokens of a chunk: each chunk is added to the whole weight gradient, which takes long for few tokens."""

MASK_CHUNK_ELEMENTS = 2**20
"""Elements of a layout-invariant dropout mask that are hashed at once."""

GRADIENTS_AT_ONCE = 2**22
"""Elements of gradients that ranks which share samples sum by one collective; a larger gradient has one of its own."""


def loss_chunk_elements(rows: int, accelerator: bool) -> int:
    """Return the logits that the chunked loss holds at once on a rank that holds `rows` rows of the head."""
    limit = LOSS_CHUNK_ELEMENTS_ACCELERATOR if accelerator else LOSS_CHUNK_ELEMENTS_CPU
    return max(limit, LOSS_CHUNK_TOKENS * rows)


def vocabulary_rows(vocabulary: int, tensor: int, multiple: int = 1) -> int:
    """Return the rows that a layer, embedding or head, has on each of t ranks: V / t, rounded up to a multiple."""
    return -(-vocabulary // (tensor * multiple)) * multiple
