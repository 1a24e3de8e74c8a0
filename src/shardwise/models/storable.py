"""Whether a checkpoint can hold a model of the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from shardwise.errors import listing
from shardwise.names import SAFETENSORS_METADATA, is_tensor_name
from shardwise.placement import placements

_DTYPES = ("float64", "float32", "float16", "bfloat16")
_SHOWN = 4


def storage_problems(model: nn.Module) -> list[str]:
    """Parameters that no checkpoint can hold, or that could not be read again."""
    dtype_of = {path: str(p.dtype).removeprefix("torch.") for path, p in model.named_parameters()}
    names = Counter(name for _, _, record in placements(model) for name in {piece.name for piece in record.pieces})
    return sentences(
        {
            f"the dtype of {{}} must be {listing(_DTYPES, 'or')}, which checkpoints have: register it as a buffer with "
            "persistent=False": [f"{path} ({dtype})" for path, dtype in dtype_of.items() if dtype not in _DTYPES],
            "several parameters have the name {}: give their layers other names": [
                name for name, count in names.items() if count > 1
            ],
            f"{{}}: a parameter's name must have printable characters only and not be {SAFETENSORS_METADATA}, which safetensors "
            "uses: give it or its module another name": [ascii(name) for name in names if not is_tensor_name(name)],
        }
    )


def sentences(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Each text with its names in place of `{}`, where there are any."""
    return [text.format(listing(names, most=_SHOWN)) for text, names in problems.items() if names]
