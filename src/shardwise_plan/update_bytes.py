"""Bytes that an optimizer's step reads and writes in a device's memory, as its kernels take and give tensors.

`tests/unit/optim/test_bytes.py` counts them.
"""

from __future__ import annotations

from shardwise.config import DTYPE_BYTES, OptimizerConfig, Precision

_FLOAT32 = 4
_WORD_BYTES = 8  # random numbers of an element, which are made and read
_GRADIENT_COPY_BYTES = _FLOAT32 + 2 * _FLOAT32  # a float32 copy of the gradient, which is written, and scaled in place
_ROUNDED_BYTES = (2 + _FLOAT32) + (_FLOAT32 + 2) + (2 + 2)
"""Of a value that is kept in bfloat16: its float32 copy is made, rounded, and the result put in its place."""


def update_bytes(
    optimizer: OptimizerConfig,
    precision: Precision,
    *,
    elements: int,
    matrices: int,
    ranks: float,
    frees_gradients: bool,
    values: int | None = None,
) -> float:
    """Predict the memory traffic of a rank's update: norm of the gradients, update, rounded weights, zeroed gradients.

    Args:
        precision: dtypes, resolved.
        elements: elements of the rank's parameters.
        matrices: number of them in matrices of blocks.
        ranks: ranks over which masters and states are cut.
        frees_gradients: True if a rank keeps only its part of the gradients.
        values: values of an element that the update reads and writes; None: those of the optimizer's class.
    """
    spec = optimizer.spec
    gradient = DTYPE_BYTES[precision.gradient]
    weight = DTYPE_BYTES[precision.parameter]
    master = DTYPE_BYTES[precision.optimizer]
    values = values or spec.update_values
    matrix_values = spec.matrix_update_values or values
    rounded = precision.rounded(len(spec.states))
    width = _FLOAT32 if rounded else master
    class_bytes = width * (values * (elements - matrices) + matrix_values * matrices)
    other_bytes = gradient  # the norm reads it
    if rounded:
        other_bytes += gradient + _GRADIENT_COPY_BYTES + rounded * _ROUNDED_BYTES + _WORD_BYTES
    else:
        # A fused kernel that clips writes the scaled gradient.
        other_bytes -= width * (spec.has_fused_kernel and optimizer.max_norm is None)
        other_bytes += (gradient + master) * (gradient != master)
    if weight != master:
        other_bytes += master + weight
    zeroed = elements / ranks if frees_gradients else elements
    return (class_bytes + other_bytes * elements) / ranks + gradient * zeroed
