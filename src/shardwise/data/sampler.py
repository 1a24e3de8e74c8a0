"""Sample order and batches: a pure function of (seed, samples consumed), whatever the layout.

Shapes: S = sequence length, B = samples of one micro-batch. Arrays are sequence-first and int64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shardwise.data.hashing import mix, mix_integer
from shardwise.errors import ConfigError

IGNORE = -100
"""The target of a position that is not counted."""

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]
Batch = tuple[IntArray, IntArray]
"""`(inputs_SB, targets_SB)`: the targets are the inputs one token further."""

_ROUNDS = 8


class Sampler:
    """The global order of `num_samples` samples, shuffled anew each epoch, without state and without replay.

    Position `p` of epoch `e` holds sample `π(p)`, where `π` is a Feistel permutation keyed by (seed, e) on the
    smallest power of two that holds all samples; a value beyond them is permuted again until it falls inside
    ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3). Any position is
    found in constant time, and integer arithmetic makes it the same everywhere.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ConfigError(f"the number of samples ({num_samples}) must be at least 1")
        self.num_samples = num_samples
        self.seed = seed
        bits = max(2, (num_samples - 1).bit_length())
        self._widths = (bits // 2, bits - bits // 2)

    def indices(self, consumed: int, count: int) -> IntArray:
        """Samples number `consumed` to `consumed + count` of the endless order."""
        parts = []
        while count > 0:
            epoch, start = divmod(consumed, self.num_samples)
            taken = min(count, self.num_samples - start)
            parts.append(self._permuted(np.arange(start, start + taken, dtype=np.uint64), epoch))
            consumed += taken
            count -= taken
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _permuted(self, positions: npt.NDArray[np.uint64], epoch: int) -> IntArray:
        keys = [np.uint64(mix_integer(self.seed, epoch, number)) for number in range(_ROUNDS)]
        values = self._feistel(positions, keys)
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            values[outside] = self._feistel(values[outside], keys)
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64], keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
        """Rounds of `(left, right) → (right, left ⊕ F(right))`; an even number leaves the widths as they began."""
        left_bits, right_bits = self._widths
        left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
        for key in keys:
            mask = np.uint64((1 << left_bits) - 1)
            left, right = right, left ^ (mix(right ^ key) & mask)
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right


class TokenBatches:
    """Batches over one long row of tokens: sample `i` is `tokens[i·S : i·S + S + 1]`."""

    def __init__(self, tokens: TokenArray, sequence_length: int, seed: int) -> None:
        if len(tokens) < sequence_length + 1:
            raise ConfigError(
                f"the tokens ({len(tokens)}) must be at least train.sequence_length + 1 ({sequence_length + 1})"
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.num_samples = (len(tokens) - 1) // sequence_length
        self.sampler = Sampler(self.num_samples, seed)

    def global_batch(self, consumed: int, size: int) -> Batch:
        """The `size` samples that follow `consumed` samples, S × size."""
        return self._gather(self.sampler.indices(consumed, size))

    def local_batch(
        self, consumed: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
    ) -> list[Batch]:
        """One rank's micro-batches of the global batch that follows `consumed` samples.

        Micro-batch `m` of rank `r` holds the `micro_batch` samples from `(m · dp_size + r) · micro_batch`, so all
        ranks' first micro-batches come before all second ones.
        """
        _check_division(global_batch, dp_rank, dp_size, micro_batch)
        indices = self.sampler.indices(consumed, global_batch)
        return [self._gather(indices[rows]) for rows in _rows(global_batch, dp_rank, dp_size, micro_batch)]

    def eval_batches(
        self, count: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
    ) -> Iterator[Batch]:
        """One rank's micro-batches of an evaluation over at most `count` global batches, each sample at most once.

        The samples are the first ones in their own order, cut over ranks as by `local_batch`. What is missing to
        equal shapes on every rank is filled with samples whose targets are all `IGNORE`: one micro-batch, or all of
        a rank's, may count nothing.
        """
        _check_division(global_batch, dp_rank, dp_size, micro_batch)
        samples = min(count * global_batch, self.num_samples)
        portion = dp_size * micro_batch
        for rows in _rows(-(-samples // portion) * portion, dp_rank, dp_size, micro_batch):
            real = np.arange(rows.start, min(rows.stop, samples))
            inputs_SB = np.zeros((self.sequence_length, micro_batch), dtype=np.int64)
            targets_SB = np.full((self.sequence_length, micro_batch), IGNORE, dtype=np.int64)
            if real.size:
                inputs_SB[:, : real.size], targets_SB[:, : real.size] = self._gather(real)
            yield inputs_SB, targets_SB

    def _gather(self, indices: IntArray) -> Batch:
        length = self.sequence_length
        rows_BS = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            rows_BS[row] = self.tokens[index * length : index * length + length + 1]
        return np.ascontiguousarray(rows_BS[:, :-1].T), np.ascontiguousarray(rows_BS[:, 1:].T)


def _rows(total: int, dp_rank: int, dp_size: int, micro_batch: int) -> list[slice]:
    portion = dp_size * micro_batch
    return [slice(start, start + micro_batch) for start in range(dp_rank * micro_batch, total, portion)]


def _check_division(global_batch: int, dp_rank: int, dp_size: int, micro_batch: int) -> None:
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(f"the data-parallel rank ({dp_rank}) must be in 0 … {dp_size - 1}")
    if global_batch < 1 or global_batch % (dp_size * micro_batch):
        raise ConfigError(
            f"train.global_batch ({global_batch}) must be a multiple of train.micro_batch × data-parallel degree "
            f"({micro_batch} × {dp_size})"
        )
