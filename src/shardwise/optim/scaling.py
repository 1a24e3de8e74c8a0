"""What lets a `torch.amp.GradScaler` drive a sharded optimizer.

A scaler looks for inf in the gradients of its own rank. By what it finds it skips the step, and changes the factor by
which it scales the next loss. Every rank must do both alike, or one rank's step pairs with another rank's next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.optim.buckets import Bucket


@torch.no_grad()
def spread_non_finite(buckets: Sequence[Bucket], gradient_norm: Tensor) -> None:
    """Where the whole model's gradient norm is not finite, make a gradient of each bucket NaN; else change nothing."""
    for bucket in buckets:
        bucket.gradients[0] += gradient_norm * 0
        bucket.note_gradients()


def require_scaled(scale: Tensor | None, *, clipped: bool) -> Tensor:
    """The factor that a scaler gives to `step`: of the loss, and so of the gradients.

    Raises:
        RuntimeError: the gradients were unscaled, or clipped, before.
    """
    if scale is None:
        raise RuntimeError(
            "scaler.unscale_(optimizer) looked for inf in one rank's gradients before they were reduced: leave it out; "
            "optimizer.step() unscales the gradients and clips them to max_norm"
        )
    if clipped:
        raise RuntimeError(
            "optimizer.clip_grad_norm_() clipped the gradients of a scaled loss: leave it out and set max_norm; "
            "optimizer.step() clips to it after it unscales"
        )
    return scale
