"""Rotary position embedding (RoFormer, arXiv:2104.09864) with the scalings that Hugging Face configurations name.

Legend: S sequence, B batch, n heads, d head width, of which the first r are rotated: elements i and i + r/2 are the two
coordinates of pair i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.config import DecoderConfig, GPTNeoXConfig


def frequencies(config: DecoderConfig | GPTNeoXConfig, sequence_length: int) -> tuple[Tensor, float]:
    """Return the rotary angle per position of each pair, `[r/2]` in float32, and the factor on cosine and sine.

    Scalings: `default`; `linear` (positions divided by `factor`); `dynamic` (NTK-aware base, grown with the sequence);
    `yarn` (arXiv:2309.00071); `longrope` (arXiv:2402.13753); `llama3` (wavelengths beyond the original context
    stretched).
    """
    # The order of operations is Hugging Face's: an error in the last bit grows with the position that it multiplies.
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    d = config.rotary_dim
    base = config.rope_theta
    longest = config.max_position_embeddings
    if kind == "dynamic":
        stretch = scaling["factor"] * max(sequence_length, longest) / longest - (scaling["factor"] - 1)
        base *= stretch ** (d / (d - 2))
    powers = base ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d)
    plain = 1.0 / powers
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "yarn":
        return _yarn(plain, base, d, longest, scaling)
    if kind == "longrope":
        return _longrope(powers, longest, sequence_length, scaling)
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return plain, 1.0


def _yarn(plain: Tensor, base: float, d: int, longest: int, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Stretch the slow pairs, keep the fast ones, and blend those between (arXiv:2309.00071)."""
    trained = scaling.get("original_max_position_embeddings") or longest
    factor = scaling["factor"]

    def pair_with(rotations: float) -> float:
        """Return the pair that rotates so often over the trained length, as a real number.

        Pair i has the angle base^(-2i/d) per position: trained · base^(-2i/d) = 2π · rotations, solved for i.
        """
        return d * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    # 32 and 1 rotations are the defaults of the paper for Llama.
    low = pair_with(scaling.get("beta_fast") or 32)
    high = pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, d - 1)
    if high == low:
        high += 0.001  # as in transformers: no division by zero
    stretched = ((torch.arange(d // 2).float() - low) / (high - low)).clamp(0, 1)
    inverse = plain / factor * stretched + plain * (1 - stretched)
    if scaling.get("attention_factor") is not None:
        return inverse, float(scaling["attention_factor"])

    def attention_factor(weight: float) -> float:
        """Return 0.1 · weight · ln(factor) + 1, the paper's fit for weight 1; DeepSeek's files have other weights."""
        if factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return inverse, attention_factor(scaling["mscale"]) / attention_factor(scaling["mscale_all_dim"])
    return inverse, attention_factor(1.0)


def _longrope(powers: Tensor, longest: int, sequence_length: int, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Divide each pair's angle by a factor of its own, one of two lists (arXiv:2402.13753)."""
    trained = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or longest / trained
    divisors = scaling["long_factor" if sequence_length > trained else "short_factor"]
    inverse: Tensor = 1.0 / (torch.tensor(divisors, dtype=torch.float32) * powers)
    if scaling.get("attention_factor") is not None:
        return inverse, float(scaling["attention_factor"])
    if factor <= 1:
        return inverse, 1.0
    return inverse, math.sqrt(1 + math.log(factor) / math.log(trained))


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Stretch pairs that rotate at most `low` times over the trained length; keep those that do `high` times."""
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] / (2 * math.pi / plain)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    mixed: Tensor = (1 - kept) * plain / scaling["factor"] + kept * plain
    return mixed


class Rotary:
    """Cosine and sine tables `[S, 1, 1, r/2]`; those of the longest sequence are kept for each device and dtype."""

    def __init__(self, config: DecoderConfig | GPTNeoXConfig) -> None:
        self._config = config
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[int, Tensor, Tensor]] = {}

    def tables(self, sequence_length: int, like: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return the tables for positions `first` … S-1 of S, on the device and in the dtype of `like`."""
        key = (like.device, like.dtype)
        regime = self.regime(sequence_length)
        kept_regime, cos, sin = self._tables.get(key, (None, like, like))
        if kept_regime != regime or len(cos) < sequence_length:
            rows = sequence_length
            if kept_regime == regime and first:
                # Generation needs one more position at a time: with twice the rows a new table is rarely needed.
                rows = max(sequence_length, 2 * len(cos))
            cos, sin = self._make(rows, sequence_length, like)
            self._tables[key] = (regime, cos, sin)
        if first == 0 and len(cos) == sequence_length:
            return cos, sin
        return cos[first:sequence_length], sin[first:sequence_length]

    def tables_of_each(self, lengths: Sequence[int], rows: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the tables `[S, B, 1, r/2]` of sequences padded to `rows`, each with the angles of its own length.

        The result is None if all of them have the angles of `tables(rows)`.
        """
        if {self.regime(length) for length in lengths} <= {self.regime(rows)}:
            return None
        tables = {length: self._make(rows, length, like) for length in set(lengths)}
        cos = torch.cat([tables[length][0] for length in lengths], dim=1)
        sin = torch.cat([tables[length][1] for length in lengths], dim=1)
        return cos, sin

    def _make(self, rows: int, sequence_length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # Made on the CPU in float32, so that all devices and dtypes have the same angles.
        inverse, factor = frequencies(self._config, sequence_length)
        angles = torch.outer(torch.arange(rows).float(), inverse).view(rows, 1, 1, -1)
        cos = torch.cos(angles).mul(factor).to(like.device, like.dtype)
        sin = torch.sin(angles).mul(factor).to(like.device, like.dtype)
        return cos, sin

    def regime(self, sequence_length: int) -> int:
        """Return a number that is equal for two lengths if their sequences have the same angle at each position."""
        scaling = self._config.rope_scaling or {}
        kind = scaling.get("rope_type", "default")
        if kind == "dynamic":  # the base is stretched beyond the longest sequence only
            return max(sequence_length, self._config.max_position_embeddings)
        if kind == "longrope":  # which of two lists counts
            return int(sequence_length > scaling["original_max_position_embeddings"])
        return 0


class _Rotate(torch.autograd.Function):
    """Rotate each pair by its angle; the gradient is rotated back. Only the tables are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_by(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_by(grads[0], cos, sin, -1.0), None, None


class RotateJoined(torch.autograd.Function):
    """heads `[S, B, n + 2·m, d]`, a product's output that nothing else reads → q and k, rotated in its memory, and v.

    `widths` are n, m and m. The gradient is one tensor too.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, widths: Sequence[int], cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.widths = widths
        joined = heads.narrow(2, 0, widths[0] + widths[1])
        _rotate_by(joined, cos, sin, 1.0, joined)
        return heads.split(widths, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.cat([*(_rotate_by(grad, cos, sin, -1.0) for grad in grads[:2]), grads[2]], 2), None, None, None
        heads = grads[0].new_empty((*grads[0].shape[:2], sum(ctx.widths), grads[0].shape[3]))
        q, k, v = heads.split(ctx.widths, dim=2)
        _rotate_by(grads[0], cos, sin, -1.0, q)
        _rotate_by(grads[1], cos, sin, -1.0, k)
        v.copy_(grads[2])
        return heads, None, None, None


def _rotate_by(x: Tensor, cos: Tensor, sin: Tensor, sign: float, rotated: Tensor | None = None) -> Tensor:
    """Rotate each pair by its angle (sign 1) or back (sign -1), into `rotated`, which may be x; keep other elements."""
    half = cos.shape[-1]
    widths = (half, half, x.shape[-1] - 2 * half)
    first, second, not_rotary = x.split_with_sizes(widths, dim=-1)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        # The compiler makes one kernel of single operations; and this gradient may be differentiated again.
        rotated_first = (first * cos).addcmul_(second, sin, value=-sign)
        rotated_second = (second * cos).addcmul_(first, sin, value=sign)
        return torch.cat((rotated_first, rotated_second, not_rotary), dim=-1)
    rotated = x.new_empty(x.shape) if rotated is None else rotated
    rotated_first, rotated_second, kept = rotated.split_with_sizes(widths, dim=-1)
    new_first = torch.mul(first, cos, out=None if rotated is x else rotated_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=rotated_second).addcmul_(first, sin, value=sign)
    if rotated is x:
        first.copy_(new_first)
    elif widths[2]:
        kept.copy_(not_rotary)
    return rotated


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[S, B, n, d]` → x, with the first r elements of each head rotated by the tables `[S, 1 or B, 1, r/2]`."""
    return cast(Tensor, _Rotate.apply(x, cos, sin))  # type: ignore[no-untyped-call]
