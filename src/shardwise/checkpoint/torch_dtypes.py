"""The dtypes that weights and optimizer states may have: their names in safetensors files, and torch's."""

from __future__ import annotations

import torch

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name in a safetensors file → torch's dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch's dtype → name in a safetensors file."""
