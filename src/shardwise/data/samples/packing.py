"""Best fit: sizes packed into rooms of one size, and samples of whole documents that are packed so.

Shapes: B = samples, S = sequence length, N = pieces of documents in a batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np

from shardwise.base.units import counted
from shardwise.data.rows import IntArray
from shardwise.data.samples.batch import IGNORE, Batch, Batches, TokenRow, TokenSource
from shardwise.data.samples.order import SampleOrder, concatenated_ranges, mix_integer

WINDOW = 1 << 20
"""Documents that are packed together: they bound the memory of packing, and fill samples as well as all would."""
# "pieces": keeps this order apart from those of other samples.
_SAMPLE_ORDER = 0x706965636573
# Tokens that are compared at once, which bounds the memory.
_SCANNED_TOKENS = 1 << 24


@dataclass(frozen=True)
class Packs:
    """Numbers of pieces of documents, divided into packs that become samples.

    `members` has one pack after another; `begins`: the place of the first number of each, then of all, [packs + 1].
    """

    members: IntArray
    begins: IntArray

    @staticmethod
    def from_sizes(members: IntArray, sizes: IntArray) -> Packs:
        """Packs that hold these members, each of them as many as its size."""
        return Packs(members, _with_zero(np.cumsum(sizes)))

    def __len__(self) -> int:
        return len(self.begins) - 1

    @property
    def sizes(self) -> IntArray:
        """The number of members of each pack."""
        return np.diff(self.begins)

    def shuffled(self, seed: int, epoch: int = 0) -> Packs:
        """The packs in the order of an epoch of `SampleOrder`."""
        if not len(self):
            return self
        order = SampleOrder(len(self), seed).indices(epoch * len(self), len(self))
        sizes = self.sizes[order]
        return Packs.from_sizes(self.members[concatenated_ranges(self.begins[order], sizes)], sizes)


def best_fit_packs(sizes: IntArray, room: int) -> Packs:
    """Best-fit packing: numbers of `sizes`, each of 1 … `room`, in packs whose sizes add up to at most `room`.

    Each size, the largest first, goes into the fullest pack that has room for it, else into a new one; of equal sizes
    the first one goes first. Best-fit decreasing (Johnson et al. 1974) needs at most 11/9 of the fewest packs, plus 4.

    Equal sizes are placed at once. Of all packs with room for one, the fullest stays the fullest until none fits any
    more: so each pack with room r takes ⌊r / size⌋ of them before the next pack takes any. Thus the number of turns
    depends on how many different sizes and rooms there are, and hardly on the number of sizes.
    """
    order = np.argsort(-sizes, kind="stable")
    pack_of = np.empty(len(sizes), dtype=np.int64)  # in this order
    number_of_packs = 0
    rooms: list[int] = []  # rooms that packs have left, sorted, each once
    by_room: dict[int, list[IntArray]] = {}  # packs of each room; the last one is filled first

    def keep(packs: IntArray, left: int) -> None:
        if left and len(packs):
            if left not in by_room:
                insort(rooms, left)
            by_room.setdefault(left, []).append(packs)

    counts = np.bincount(sizes)
    first = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        stop = first + int(counts[size])
        while first < stop:
            place = bisect_left(rooms, size)
            left = rooms[place] if place < len(rooms) else room
            fitting = left // size
            needed = -(-(stop - first) // fitting)
            if place == len(rooms):
                packs = np.arange(number_of_packs, number_of_packs + needed)
                number_of_packs += needed
            else:
                packs = by_room[left].pop()
                if not by_room[left]:
                    del by_room[left], rooms[place]
                keep(packs[: max(0, len(packs) - needed)], left)
                packs = packs[::-1][:needed]
            taken = min(stop - first, fitting * len(packs))
            pack_of[first : first + taken] = np.repeat(packs, fitting)[:taken]
            first += taken
            full, remainder = divmod(taken, fitting)
            keep(packs[:full], left - fitting * size)
            keep(packs[full : full + 1], left - remainder * size)
    return Packs.from_sizes(order[np.argsort(pack_of, kind="stable")], np.bincount(pack_of))


@dataclass(frozen=True)
class PackingFacts:
    """Counts of packed documents and their samples."""

    documents: int = 0
    cut: int = 0  # number of documents that are longer than a sample
    targets: int = 0  # number of targets, the tokens of all documents but the first of each
    with_beginning: int = 0  # number of targets whose sample has all tokens of their document before them
    with_beginning_if_cut: int = 0  # the same if samples were cut from the row of all documents
    samples: int = 0
    places: int = 0  # number of tokens that all samples have room for

    def __add__(self, addend: PackingFacts) -> PackingFacts:
        return PackingFacts(*(a + b for a, b in zip(astuple(self), astuple(addend), strict=True)))

    def __str__(self) -> str:
        if not self.samples:
            return "packed by best fit: no sample, as no document has two tokens"
        cut = "no document cut"
        if self.cut:
            cut = f"{self.cut:,} of {counted(self.documents, 'document')} cut, as they are longer than a sample"
        return (
            f"packed by best fit: {counted(self.samples, 'sample')} with {1 - self.targets / self.places:.2%} padding, "
            f"{cut}; {self.with_beginning / self.targets:.1%} of targets have the beginning of their document in their "
            f"sample ({self.with_beginning_if_cut / self.targets:.1%} with data.packing=cut)"
        )


@dataclass(frozen=True)
class PackedSamples:
    """Samples of whole documents, and of pieces of documents that are longer than a sample.

    A document of n tokens has n - 1 that are read, as its last token is a target alone. If these are more than S, they
    are cut into pieces of S and a rest.
    """

    # First token of each piece and the number of its tokens that are read, one sample after another, [pieces, 2].
    pieces: IntArray
    begins: IntArray  # first piece of each sample, then the number of pieces, [samples + 1]
    length: int
    facts: PackingFacts

    def joined(self, number: int) -> PackedSamples:
        """Samples that each have the pieces of `number` consecutive ones; pieces of a document become one."""
        if number == 1:
            return self
        begins = self.begins[::number]
        sample_of = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
        order = np.lexsort((self.pieces[:, 0], sample_of))
        pieces = np.asarray(self.pieces)[order]
        is_new = np.append(True, (pieces[1:, 0] != pieces[:-1].sum(axis=1)) | (np.diff(sample_of) > 0))
        firsts = np.flatnonzero(is_new)
        pieces = np.stack([pieces[firsts, 0], np.add.reduceat(pieces[:, 1], firsts)], axis=1)
        facts = replace(self.facts, samples=len(begins) - 1)
        return PackedSamples(pieces, np.searchsorted(firsts, begins), self.length * number, facts)

    @staticmethod
    def from_bounds(bounds: IntArray, length: int) -> PackedSamples:
        """All samples of documents with these bounds, see `packed_windows`."""
        windows = [*packed_windows(bounds, length)]
        sizes = [np.diff(window.begins) for window in windows]
        return PackedSamples(
            np.concatenate([window.pieces for window in windows]),
            _with_zero(np.cumsum(np.concatenate(sizes))),
            length,
            sum((window.facts for window in windows), PackingFacts()),
        )


def packed_windows(bounds: IntArray, length: int, together: int = 1) -> Iterator[PackedSamples]:
    """The samples of each `WINDOW` consecutive documents, as the bounds and the lengths alone decide them.

    Args:
        bounds: first token of each document, then the number of tokens, [documents + 1].
        together: samples of a block, in which the pieces of a document that is longer than a sample follow each other,
            see `PackedSamples.joined`.
    """
    for number, start in enumerate(range(0, len(bounds) - 1, WINDOW)):
        window = bounds[start : start + WINDOW + 1]
        pieces = _pieces(window, length)
        # Else the first samples, which a short evaluation reads, would have the longest documents.
        seed = mix_integer(_SAMPLE_ORDER, number)
        packs = best_fit_packs(pieces[:, 1], length).shuffled(seed)
        if together > 1 and len(packs):
            packs = _in_blocks(packs, pieces, together, seed)
        yield PackedSamples(pieces[packs.members], packs.begins, length, _facts(window, length, len(packs)))


def _in_blocks(packs: Packs, pieces: IntArray, together: int, seed: int) -> Packs:
    """The packs in blocks of `together`, which hold the pieces of a long document together.

    The packs of a document's pieces are a chain, of at most a block. Two chains become one where they meet, as the last
    piece of a document may share its pack with that of another one, if both fit in a block. Best fit puts chains into
    blocks. The blocks that are not full are joined and cut again, so that only the last one has packs without members.
    """
    numbers = np.arange(len(pieces))
    pack_of = np.empty(len(pieces), dtype=np.int64)
    pack_of[packs.members] = np.repeat(np.arange(len(packs)), packs.sizes)
    # A piece continues the one before if it begins where that ends; a block of pieces ends a chain.
    continues = np.append(False, pieces[1:, 0] == pieces[:-1].sum(axis=1))
    nth = numbers - np.maximum.accumulate(np.where(continues, 0, numbers))
    continued = numbers[continues & (nth % together > 0)]
    # Of several such pieces in a pack, the first one has the pack in the chain of its document.
    linked = continued[np.unique(pack_of[continued], return_index=True)[1]]
    is_linked = np.isin(numbers, linked)
    # The piece by which each pack is in a chain.
    main = packs.members[np.lexsort((~is_linked[packs.members], pack_of[packs.members]))][packs.begins[:-1]]
    _, chain_of = np.unique(np.cumsum(~is_linked)[main], return_inverse=True)
    chain_of = _merged(chain_of, pack_of[np.setdiff1d(continued, linked)[:, None] - [1, 0]], together)
    order = np.lexsort((main, chain_of))
    _, firsts, sizes = np.unique(chain_of[order], return_index=True, return_counts=True)
    shuffled = SampleOrder(len(sizes), seed).indices(0, len(sizes))
    blocks = best_fit_packs(sizes[shuffled], together).shuffled(seed)
    chains = shuffled[blocks.members]
    in_full = np.repeat(np.add.reduceat(sizes[chains], blocks.begins[:-1]) == together, blocks.sizes)
    chains = np.concatenate([chains[in_full], chains[~in_full]])
    chosen = order[concatenated_ranges(firsts[chains], sizes[chains])]
    filling = np.zeros(-len(packs) % together, dtype=np.int64)
    return Packs.from_sizes(
        packs.members[concatenated_ranges(packs.begins[chosen], packs.sizes[chosen])],
        np.concatenate([packs.sizes[chosen], filling]),
    )


def _merged(chain_of: IntArray, meetings: IntArray, most: int) -> IntArray:
    """The chain of each pack after the chains of packs that meet were merged, up to `most` packs in a chain."""
    sizes = np.bincount(chain_of).tolist()
    parents = [*range(len(sizes))]

    def root(chain: int) -> int:
        while parents[chain] != chain:
            parents[chain] = parents[parents[chain]]
            chain = parents[chain]
        return chain

    for first, second in chain_of[meetings].tolist():
        first, second = root(first), root(second)
        if first != second and sizes[first] + sizes[second] <= most:
            parents[second] = first
            sizes[first] += sizes[second]
    return np.array([root(chain) for chain in range(len(sizes))])[chain_of]


def _pieces(bounds: IntArray, length: int) -> IntArray:
    """The pieces of documents, in their order; documents of one token have none."""
    read = np.maximum(np.diff(bounds) - 1, 0)
    number = -(-read // length)
    offsets = concatenated_ranges(np.zeros_like(number), number) * length
    starts = np.repeat(bounds[:-1], number) + offsets
    return np.stack([starts, np.minimum(np.repeat(read, number) - offsets, length)], axis=1)


def _facts(bounds: IntArray, length: int, samples: int) -> PackingFacts:
    targets = np.maximum(np.diff(bounds) - 1, 0)
    before_the_cut = length - bounds[:-1] % length
    return PackingFacts(
        documents=len(targets),
        cut=int(np.count_nonzero(targets > length)),
        targets=int(targets.sum()),
        with_beginning=int(np.minimum(targets, length).sum()),
        with_beginning_if_cut=int(np.minimum(targets, before_the_cut).sum()),
        samples=samples,
        places=samples * length,
    )


def document_bounds(tokens: TokenRow, end: int) -> IntArray:
    """The first token of each document of a row, then the number of tokens; `end` is the last token of a document.

    Tokens after the last end are a document too.
    """
    ends = [
        np.flatnonzero(tokens[start : start + _SCANNED_TOKENS] == end) + start + 1
        for start in range(0, len(tokens), _SCANNED_TOKENS)
    ]
    bounds = _with_zero(np.concatenate([np.empty(0, dtype=np.int64), *ends]))
    return bounds if bounds[-1] == len(tokens) else np.append(bounds, len(tokens))


def _with_zero(numbers: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), numbers])


def packed_batch(ids_SB: IntArray, targets_SB: IntArray, starts_SB: IntArray, samples: IntArray) -> Batch:
    """The batch of packed samples; `starts_SB` is the place at which the document of each place begins."""
    positions_SB = np.arange(len(ids_SB))[:, None] - starts_SB
    inputs = {"ids_SB": ids_SB, "targets_SB": targets_SB, "positions_SB": positions_SB, "starts_SB": starts_SB}
    return Batch(inputs, np.array([np.count_nonzero(targets_SB != IGNORE)]), samples)


class PackedBatches(Batches):
    """Batches of packed samples, each of whose documents attends to itself alone and has positions from 0 on.

    The samples are the same in each epoch, in another order, which keeps blocks of `together`. Inputs: see
    `causal_batch`. The rest of a sample is padding: ids 0, which are a document of their own, and targets `IGNORE`.
    """

    objectives = ("lm",)

    def __init__(self, tokens: TokenSource, packed: PackedSamples, seed: int, together: int = 1) -> None:
        super().__init__(packed.facts.samples, seed, together)
        self.tokens = tokens
        self.packed = packed

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        begins = self.packed.begins
        numbers_B = np.maximum(indices, 0)
        # A sample that counts nothing has no pieces.
        pieces_B = np.where(indices >= 0, begins[numbers_B + 1] - begins[numbers_B], 0)
        starts_N, sizes_N = self.packed.pieces[concatenated_ranges(begins[numbers_B], pieces_B)].T
        sample_N = np.repeat(np.arange(len(indices)), pieces_B)
        read_B = np.bincount(sample_N, weights=sizes_N, minlength=len(indices)).astype(np.int64)
        place_N = np.cumsum(sizes_N) - sizes_N - (np.cumsum(read_B) - read_B)[sample_N]
        # Each piece is followed by its last target.
        row = self.tokens.take(concatenated_ranges(starts_N, sizes_N + 1))
        ends_N = np.cumsum(sizes_N + 1)
        is_read_BS = np.arange(self.packed.length) < read_B[:, None]
        ids_BS = np.zeros(is_read_BS.shape, dtype=np.int64)
        targets_BS = np.full(is_read_BS.shape, IGNORE, dtype=np.int64)
        starts_BS = np.repeat(read_B[:, None], self.packed.length, axis=1)
        ids_BS[is_read_BS] = np.delete(row, ends_N - 1)
        targets_BS[is_read_BS] = np.delete(row, ends_N - sizes_N - 1)
        starts_BS[is_read_BS] = np.repeat(place_N, sizes_N)
        ids_SB, targets_SB, starts_SB = map(np.ascontiguousarray, (ids_BS.T, targets_BS.T, starts_BS.T))
        return packed_batch(ids_SB, targets_SB, starts_SB, samples)
