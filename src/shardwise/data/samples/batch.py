"""Batches: samples as a model reads them in one forward, and a global batch cut over ranks and micro-batches.

Shapes: S = sequence length, B = samples of one micro-batch, K = objectives of the loss. Arrays are sequence-first,
int64 and contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from shardwise.base.errors import ConfigError, listing
from shardwise.data.rows import AnyArray, IntArray
from shardwise.data.samples.order import MixtureStage, SampleOrder, SourceOrder

IGNORE = -100
"""The target of a position that is not counted: the `ignore_index` of torch's cross-entropy unless it is given."""


class TokenSource(Protocol):
    """A row of the data's tokens: an array, or an object that checks the tokens that it returns."""

    def __len__(self) -> int: ...

    def take(self, places: IntArray, /) -> AnyArray:
        """The tokens at `places`."""
        ...


class TokenRow(TokenSource, Protocol):
    """A row of the data's tokens of which slices are read too."""

    def __getitem__(self, places: slice, /) -> AnyArray: ...


@dataclass(frozen=True)
class Batch:
    """The samples of one rank's micro-batch."""

    inputs: dict[str, IntArray]  # arrays by the keywords of the model's forward
    counts: IntArray  # counted targets of each objective, [K]; their sum over the global batch divides its losses
    # Number of each sample in the run, [B]: the samples consumed before its global batch, plus its position in that
    # batch.
    samples: IntArray
    # Inputs of each sample that are not padding, which is at the end, [B]; None unless the model is causal.
    lengths: IntArray | None = None


MANY_EPOCHS = 100
"""Epochs above which a training is warned: its data are more likely a mistake than meant."""
REPEATED_TEXT = "a text that is repeated more than four times teaches little (arXiv:2305.16264)"


class Batches(ABC):
    """Batches of samples in an order that is a pure function of (seed, samples consumed), cut for any layout.

    Unless a class says otherwise, there are `num_samples`, which are shuffled in each epoch (`SampleOrder`).

    Args:
        num_samples: number of samples; those after the last whole block of `together` samples are left out.
        together: samples of a block, see `SampleOrder`.
    """

    objectives: tuple[str, ...]
    """Objectives whose targets `Batch.counts` counts, in its order: `("lm",)` or `("mlm", "nsp")`."""
    is_consecutive = False
    """True if a rank's micro-batches follow each other in a global batch, False if those of all ranks take turns."""

    def __init__(self, num_samples: int, seed: int, together: int = 1) -> None:
        self.sampler = SampleOrder(num_samples - num_samples % together, seed, together)

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self.sampler.num_samples

    def epochs(self, samples: int) -> str:
        """Epochs of a run of this many samples, for the user."""
        number = samples / self.num_samples
        shown = f"{number:,.2f}" if number >= 0.01 else f"{number:.1g}"  # of a small fraction the first digit: 0.0004
        return f"{shown} epochs of {self.num_samples:,} samples"

    @abstractmethod
    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        """The batch of the samples `indices` [B] as they are in `epochs` [B]; index -1 is a sample that counts nothing.

        `samples` becomes `Batch.samples`.
        """

    def draw(self, consumed: int, count: int) -> tuple[IntArray, IntArray]:
        """The indices and the epochs of the `count` samples that follow `consumed` samples."""
        return self.sampler.indices(consumed, count), np.arange(consumed, consumed + count) // self.sampler.num_samples

    def evaluated(self, numbers: IntArray) -> IntArray:
        """The indices of these samples of an evaluation, which has each sample once."""
        return numbers

    def state(self, consumed: int) -> dict[str, Any]:
        """The state from which `restore` continues after `consumed` samples; empty if it needs none."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most batches have no state
        """Continue from a state, which is not empty; samples before it cannot be asked for then."""

    def close(self) -> None:  # noqa: B027 - most batches read nothing ahead
        """Stop reading ahead, for which an ending process would wait; batches may be asked for again."""

    def places_of_rank(self, total: int, dp_rank: int, dp_size: int, micro_batch: int) -> IntArray:
        """The places of a rank's samples of `total`, [micro-batches, samples of each]; ConfigError: not whole ones."""
        if not 0 <= dp_rank < dp_size:
            raise ConfigError(f"the data-parallel rank ({dp_rank}) must be in 0 … {dp_size - 1}")
        if total < 1 or total % (dp_size * micro_batch):
            raise ConfigError(
                f"train.global_batch ({total}) must be a multiple of train.micro_batch × data-parallel degree "
                f"({micro_batch} × {dp_size})"
            )
        # The micro-batches of all ranks follow each other in rank order, or take turns.
        shape = (dp_size, -1, micro_batch) if self.is_consecutive else (-1, dp_size, micro_batch)
        places = np.arange(total).reshape(shape)
        return places[dp_rank] if self.is_consecutive else places[:, dp_rank]

    def blank(self, micro_batch: int) -> Batch:
        """A micro-batch that counts nothing; the arrays of any other have its names and shapes."""
        zeros_B = np.zeros(micro_batch, dtype=np.int64)
        return self.collate(zeros_B - 1, zeros_B, zeros_B)

    def global_batch(self, consumed: int, size: int) -> Batch:
        """The `size` samples that follow `consumed` samples, as one batch."""
        return self.local_batch(consumed, size, 0, 1, size)[0]

    def local_batch(
        self, consumed: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
    ) -> list[Batch]:
        """One rank's micro-batches of the global batch that follows `consumed` samples.

        Micro-batch `m` of rank `r` holds the `micro_batch` samples from `(m · dp_size + r) · micro_batch`, so all
        ranks' first micro-batches come before all second ones; or a rank's micro-batches follow each other, where
        `is_consecutive`. Several threads may call it at once.
        """
        places_MB = self.places_of_rank(global_batch, dp_rank, dp_size, micro_batch)
        indices, epochs = self.draw(consumed, global_batch)
        return [self.collate(indices[places], epochs[places], consumed + places) for places in places_MB]

    def eval_micro_batches(self, count: int, global_batch: int, portion: int) -> int:
        """Micro-batches of an evaluation on each rank; `portion`: samples of one over all ranks."""
        return -(-min(count * global_batch, self.num_samples) // portion)

    def eval_batches(
        self, count: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
    ) -> Iterator[Batch]:
        """One rank's micro-batches of an evaluation over at most `count` global batches, each sample at most once.

        The samples are the first ones in their own order, cut over ranks as by `local_batch`. So that all ranks have
        equal shapes, samples that count nothing are added: one micro-batch, or all of a rank's, may count nothing.
        """
        # Samples that only fill up must not hide a global batch that cannot be cut.
        self.places_of_rank(global_batch, dp_rank, dp_size, micro_batch)
        real = min(count * global_batch, self.num_samples)
        portion = dp_size * micro_batch
        total = self.eval_micro_batches(count, global_batch, portion) * portion
        for samples in self.places_of_rank(total, dp_rank, dp_size, micro_batch) if total else ():
            indices = np.where(samples < real, self.evaluated(np.minimum(samples, real - 1)), -1)
            # Epoch 0 each time: every evaluation sees the same samples.
            yield self.collate(indices, np.zeros_like(samples), samples)


class BlendedBatches(Batches):
    """`Batches` of K sources in the proportions of their weights.

    The sources' samples follow one another as `SourceOrder` says; each source has its own order and its own epochs, the
    next of which begins when it is exhausted. So a sample is a function of (seed, samples consumed). An evaluation, of
    a single stage, has each sample of each source once: if a source is exhausted, the others continue without it.

    Index `i·K + s` is sample `i` of source `s`.

    Args:
        stages: weights of the sources that are read, one stage after another; they count blocks.
    """

    def __init__(self, sources: Mapping[str, Batches], stages: Sequence[MixtureStage], together: int = 1) -> None:
        self.order = SourceOrder([*sources], stages)
        self.together = together
        self.batches = [*sources.values()]
        self.objectives = self.batches[0].objectives

    @property
    def num_samples(self) -> int:
        """All samples of all sources."""
        return sum(batches.num_samples for batches in self.batches)

    def epochs(self, samples: int) -> str:
        return listing(f"{name}: {batches.epochs(drawn)}" for name, batches, drawn in self._drawn_by_source(samples))

    def repeated(self, samples: int) -> dict[str, float]:
        """Epochs of each source among the first `samples` of the run, by name."""
        return {name: drawn / batches.num_samples for name, batches, drawn in self._drawn_by_source(samples)}

    def _drawn_by_source(self, samples: int) -> Iterator[tuple[str, Batches, int]]:
        for source, (name, batches) in enumerate(zip(self.order.names, self.batches, strict=True)):
            yield name, batches, self.drawn(source, samples)

    def drawn(self, source: int, samples: int) -> int:
        """Samples of a source among the first `samples` of the run."""
        assert samples % self.together == 0, "a step reads whole blocks"
        return int(self.order.before(source, np.array([samples // self.together]))[0]) * self.together

    def sources(self, samples: IntArray) -> IntArray:
        """The number of the source of each of these samples."""
        return self.order.sources(samples // self.together)

    def draw(self, consumed: int, count: int) -> tuple[IntArray, IntArray]:
        sources = self.sources(np.arange(consumed, consumed + count))
        indices = np.empty_like(sources)
        epochs = np.empty_like(sources)
        for source, batches in enumerate(self.batches):
            chosen = np.flatnonzero(sources == source)
            # A source's samples are consecutive in its own order, so one number is enough to find them.
            source_indices, epochs[chosen] = batches.draw(self.drawn(source, consumed), len(chosen))
            indices[chosen] = source_indices * len(self.batches) + source
        return indices, epochs

    def evaluated(self, numbers: IntArray) -> IntArray:
        (pattern,) = self.order.patterns
        (chosen,) = self.order.chosen
        numbers = pattern.without_repeats([self.batches[source].num_samples for source in chosen], numbers)
        local = pattern.sources(numbers)
        before = np.stack([pattern.before(number, numbers) for number in range(len(chosen))])
        return np.asarray(before[local, np.arange(len(numbers))] * len(self.batches) + chosen[local])

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        # A sample that counts nothing is made by the first source.
        source_indices, sources = np.divmod(indices, len(self.batches))
        sources[indices < 0] = 0
        source_indices[indices < 0] = -1
        parts = []
        places = []
        for source in np.unique(sources):
            chosen = np.flatnonzero(sources == source)
            parts.append(self.batches[source].collate(source_indices[chosen], epochs[chosen], samples[chosen]))
            places.append(chosen)
        return join_batches(parts, places, samples)

    def blank(self, micro_batch: int) -> Batch:
        return self.batches[0].blank(micro_batch)

    def set_stages(self, stages: Sequence[MixtureStage]) -> None:
        """Replace the stages; those of samples that were drawn must stay."""
        self.order = SourceOrder(self.order.names, stages)

    def state(self, consumed: int) -> dict[str, Any]:
        states = {name: batches.state(drawn) for name, batches, drawn in self._drawn_by_source(consumed)}
        streams = {name: state for name, state in states.items() if state}
        return {"stages": [asdict(stage) for stage in self.order.stages], "streams": streams}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, batches in zip(self.order.names, self.batches, strict=True):
            if name in state["streams"]:
                batches.restore(state["streams"][name])

    def close(self) -> None:
        for batches in self.batches:
            batches.close()


def join_batches(batches: Sequence[Batch], places: Sequence[IntArray], samples: IntArray) -> Batch:
    """One batch of the samples of several, each at its `places`. Samples are the last dimension of all inputs."""
    inputs: dict[str, IntArray] = {}
    lengths = None if batches[0].lengths is None else np.zeros_like(samples)
    for batch, chosen in zip(batches, places, strict=True):
        for name, array in batch.inputs.items():
            target = inputs.setdefault(name, np.empty((*array.shape[:-1], len(samples)), dtype=array.dtype))
            target[..., chosen] = array
        if lengths is not None and batch.lengths is not None:
            lengths[chosen] = batch.lengths
    counts: IntArray = np.sum([batch.counts for batch in batches], axis=0)
    return Batch(inputs, counts, samples, lengths)
