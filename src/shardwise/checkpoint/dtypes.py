"""The dtypes that a model can be trained from: names of safetensors, and torch's."""

import torch

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
