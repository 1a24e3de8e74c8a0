"""Values in another floating-point format, as numpy has their bits: bfloat16 is the upper half of float32.

Rounded to the nearest, ties to even; by way of float32, as torch casts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of torch → of safetensors."""
FLOATING = {**{name: dtype for dtype, name in FLOATS.items()}, "F64": "float64"}
_NAN = np.uint16(0x7FC0)


def cast(values: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[Any]:
    """`values` of the format `source` as `target` has them; either is a name of safetensors in `FLOATING`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values if source == target else _narrow(_widen(values, source), target)


def overflows(values: npt.NDArray[Any], source: str, target: str) -> bool:
    """Whether a finite value becomes infinite by the cast: float16 ends at 65,504."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = _widen(values, source)
        return bool((np.isfinite(wide) & ~np.isfinite(_widen(_narrow(wide, target), target))).any())


def _widen(values: npt.NDArray[Any], source: str) -> npt.NDArray[np.float32]:
    if source == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _narrow(wide: npt.NDArray[np.float32], target: str) -> npt.NDArray[Any]:
    if target == "F16":
        return wide.astype(np.float16)
    if target == "BF16":
        bits = np.ascontiguousarray(wide).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(wide), _NAN, rounded)
    return wide
