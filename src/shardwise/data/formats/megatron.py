"""Megatron's data sets: one, or several in a blend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shardwise.base.errors import DataError, Problems, raise_problems
from shardwise.base.units import counted, size
from shardwise.config import DataConfig
from shardwise.data.formats import inspections, packing_cache, prepared_data
from shardwise.data.formats.data_format import DataFormat, FirstDocuments, Inspection, LengthStatistics
from shardwise.data.reading import data_manifest, megatron_files, token_files
from shardwise.data.request import DataRequest
from shardwise.data.rows import PART_NAMES, PairTokens, Part, json_digest, part_bounds, part_sizes_text
from shardwise.data.samples import batch, causal, order, packing

# An inspection takes seconds: the most documents whose lengths it looks at, the most blocks of tokens in which it looks
# for the lowest and the highest id, and the tokens of a block.
_LENGTHS = 1 << 20
_BLOCKS = 256
_BLOCK_TOKENS = 1 << 16
_Parts = Mapping[Part, tuple[megatron_files.MegatronDocuments, ...]]
"""The documents of each part in each of the data sets."""
_BLEND_ORDER = 2  # the version of the order in which data sets of a blend take turns


@dataclass(frozen=True)
class _PreparedDocuments(prepared_data.PreparedData):
    """One Megatron data set, or several in a blend.

    Attributes:
        vocab_size: vocabulary of the tokenizer, or the model's if there is none.
        pair_tokens: special tokens that sentence pairs are made with; None unless samples are sentence pairs.
        packed: samples of the parts of each data set; empty unless whole documents are packed.
    """

    weights: tuple[float, ...]
    parts: _Parts
    vocab_size: int
    pair_tokens: PairTokens | None = None
    packed: tuple[Mapping[Part, packing.PackedSamples], ...] = ()

    def count(self, part: Part) -> int:
        return sum(map(len, self.parts[part]))

    def beginning(self, part: Part, tokens: int) -> list[int]:
        return next((documents.beginning(tokens) for documents in self.parts[part] if len(documents)), [])

    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> batch.Batches | None:
        """The batches of a part, see `PreparedData`; a data set whose part holds less than one sample is left out."""
        weights: dict[str, float] = {}
        sources: dict[str, batch.Batches] = {}
        for number, (weight, documents) in enumerate(zip(self.weights, self.parts[part], strict=True)):
            batches = self._batches_of_data_set(request, documents, number, part, evaluation=evaluation, tail=tail)
            if batches is not None:
                name = self._name(number)
                weights[name] = weight
                sources[name] = batches
        if len(sources) > 1:
            together = 1 if evaluation else request.samples_together
            return batch.BlendedBatches(sources, [order.MixtureStage(0, 0, weights)], together)
        return next(iter(sources.values()), None)

    def _name(self, number: int) -> str:
        """The name of a data set: the last part of its prefix, with its number if others have it too."""
        names = [documents.file.prefix.name for documents in self.parts["train"]]
        return names[number] if names.count(names[number]) == 1 else f"{names[number]}-{number}"

    def _batches_of_data_set(
        self,
        request: DataRequest,
        documents: megatron_files.MegatronDocuments,
        number: int,
        part: Part,
        *,
        evaluation: bool,
        tail: bool,
    ) -> batch.Batches | None:
        seed = request.seed
        if number:  # two data sets of one size must not go through it in one order
            seed = order.mix_integer(seed, number)
        if self.pair_tokens is not None:
            sentences = documents.sentences
            return prepared_data.pair_batches(request, documents, sentences, self.pair_tokens, self.vocab_size, seed)
        together = 1 if evaluation else request.samples_together
        if self.packed:
            return prepared_data.packed_batches(request, documents, self.packed[number].get(part), seed, together)
        if evaluation:  # in the order of the file, as any other program reads it
            return prepared_data.row_batches(request, documents, self.tokenizer_path, seed, tail=tail)
        length = request.sequence_length
        if len(documents) <= length * together:
            return None
        ends = prepared_data.document_ends(request.data, self.tokenizer_path)
        return causal.DocumentBatches(documents, length, seed, ends=ends, together=together)


def _open_data(request: DataRequest) -> _PreparedDocuments:
    problems = Problems(prepared_data.missing_tokenizer_problems(request, has_documents=True))
    files: list[megatron_files.IndexedFile] = []
    for _, prefix in request.data.weighted_prefixes:
        with problems:
            files.append(megatron_files.IndexedFile.open(prefix))
    tokenizer = prepared_data.tokenizer_of_tokens(request, _manifests(request.data), problems)
    raise_problems(DataError, problems)
    parts = _parts(files, request)
    raise_problems(DataError, _too_short(parts, request))
    packed_parts = tuple(_packed(files, parts, request))
    weights = tuple(weight for weight, _ in request.data.weighted_prefixes)
    # A fingerprint of the bounds too: another split of the same files is other data.
    bounds = {part: [(chosen.first, chosen.stop) for chosen in documents] for part, documents in parts.items()}
    return _PreparedDocuments(
        tokenizer_path=prepared_data.tokenizer_in_cache(request, tokenizer),
        weights=weights,
        parts=parts,
        fingerprint=json_digest(
            {"digests": [file.digest for file in files], "weights": weights, "bounds": bounds}
            # Blends had another order of their data sets before.
            | ({"order": _BLEND_ORDER} if len(files) > 1 else {})
        ),
        vocab_size=request.vocab_size if tokenizer is None else tokenizer.vocab_size,
        summary=_summary(files, parts, request) + packing_cache.packing_facts_text(packed_parts),
        packed=packed_parts,
        pair_tokens=tokenizer.pair_tokens() if tokenizer is not None and request.in_pairs else None,
    )


def _packed(
    files: Sequence[megatron_files.IndexedFile], parts: _Parts, request: DataRequest
) -> Iterator[Mapping[Part, packing.PackedSamples]]:
    """The packed samples of each data set, if `request` asks for them; DataError if a data set is a single document."""
    if not request.data.packs_documents:
        return
    problems = [
        f"{file.prefix} must have several documents, as data.packing ({request.data.packing}) packs documents, and it "
        "is one: prepare it again with the token that ends a document (--eod-token), or set data.packing=cut"
        for file in files
        if file.num_documents == 1
    ]
    raise_problems(DataError, problems)
    for number, file in enumerate(files):
        documents = {part: chosen[number] for part, chosen in parts.items()}
        numbers = {part: (chosen.first, chosen.stop) for part, chosen in documents.items()}
        bounds = {part: chosen.bounds for part, chosen in documents.items() if len(chosen)}
        key = packing_cache.packing_key([file.digest, numbers], request)
        yield packing_cache.open_packed_samples(request, file.prefix, key, bounds)


def _manifests(data: DataConfig) -> list[Path]:
    return [
        data_manifest.manifest_of_prefix(megatron_files.megatron_prefix(prefix)) for _, prefix in data.weighted_prefixes
    ]


def _preview(request: DataRequest) -> str:
    sequences = [megatron_files.count_sequences(prefix) for _, prefix in request.data.weighted_prefixes]
    return f"{counted(sum(sequences), 'sequence')} in Megatron's format, as the headers of .idx files say"


def _most_tokens(request: DataRequest, limit: int) -> int | None:
    if request.in_pairs:
        return None
    total = sum(megatron_files.count_tokens(prefix) for _, prefix in request.data.weighted_prefixes)
    return total if total <= limit else None


def _inspect(data: DataConfig, samples: int) -> Inspection:
    assert data.path is not None
    prefix = megatron_files.megatron_prefix(data.path)
    file = megatron_files.IndexedFile.open(prefix)
    number = file.num_documents
    total = len(file.tokens)
    chosen = inspections.evenly_spread(number, _LENGTHS)
    lengths = file.starts(chosen + 1) - file.starts(chosen)
    empty = int(np.count_nonzero(lengths == 0))
    documents = f"{number:,}"
    if empty:
        documents += f", {empty:,} without tokens"
        if len(chosen) < number:
            documents += f" of {len(chosen):,} that were looked at"
    inspection = Inspection(
        str(prefix),
        "Megatron .bin and .idx",
        sum(Path(f"{prefix}{suffix}").stat().st_size for suffix in (".bin", ".idx")),
        rows=[
            ("documents", documents),
            ("sequences", f"{len(file.sizes):,}"),
            ("tokens", f"{total:,}, {file.tokens.dtype.name}"),
        ],
        counts={
            "documents": number,
            "sequences": len(file.sizes),
            "tokens": total,
            "dtype": file.tokens.dtype.name,
            "empty_documents": empty,
        },
        lengths=LengthStatistics.of("tokens of a document", lengths, number),
        manifest=data_manifest.read_manifest(data_manifest.manifest_of_prefix(prefix)),
    )
    if total <= _BLOCKS * _BLOCK_TOKENS:
        starts = list(range(0, total, _BLOCK_TOKENS))
    else:
        starts = inspections.evenly_spread(total - _BLOCK_TOKENS + 1, _BLOCKS).tolist()
    blocks = [file.tokens[start : start + _BLOCK_TOKENS] for start in starts]
    bounds = file.starts(np.arange(min(samples, number) + 1)).tolist()
    leading = [file.tokens[start:end] for start, end in pairwise(bounds)]
    return inspections.inspection_with_tokens(inspection, data.tokenizer, leading, blocks, total)


def _first_documents(data: DataConfig) -> FirstDocuments:
    assert data.path is not None
    file = megatron_files.IndexedFile.open(megatron_files.megatron_prefix(data.path))
    number = min(file.num_documents, packing.WINDOW)
    return FirstDocuments(file.tokens, file.starts(np.arange(number + 1)), number == file.num_documents)


def _parts(files: Sequence[megatron_files.IndexedFile], request: DataRequest) -> _Parts:
    parts: dict[Part, list[megatron_files.MegatronDocuments]] = {part: [] for part in PART_NAMES}
    for file in files:
        bounds = part_bounds(file.num_documents, request.data.split_weights)
        for part, (first, stop) in zip(PART_NAMES, pairwise(bounds), strict=True):
            parts[part].append(megatron_files.MegatronDocuments(file, first, stop, request.vocab_size))
    return {part: tuple(documents) for part, documents in parts.items()}


def _too_short(parts: _Parts, request: DataRequest) -> list[str]:
    """The problems of parts that are too short: training needs a sample of each data set, an evaluation one of any."""
    problems = []
    for part in request.needed_parts:
        short = []  # the problems of this part
        for documents in parts[part]:
            sentences = documents.sentences if request.in_pairs else None
            short += prepared_data.too_few_samples(
                request, part, documents.file.prefix, len(documents), sentences, documents.count
            )
        if part == "train" or len(short) == len(parts[part]):
            problems += short
    return problems


def _summary(files: Sequence[megatron_files.IndexedFile], parts: _Parts, request: DataRequest) -> str:
    if request.data.blend is None:
        name = request.data.name
    else:
        total = sum(weight for weight, _ in request.data.weighted_prefixes)
        name = " + ".join(f"{weight / total:.3g} × {prefix}" for weight, prefix in request.data.weighted_prefixes)
    number = sum(file.num_documents for file in files)
    tokens = {part: sum(map(len, documents)) for part, documents in parts.items()}
    nbytes = size(sum(file.tokens.nbytes for file in files))
    return f"{name}: {nbytes}, {counted(number, 'document')}, {part_sizes_text(tokens)} tokens"


FORMAT = DataFormat(
    name="megatron",
    contents="tokens",
    is_at=lambda path: megatron_files.is_megatron_file(path) and not token_files.flat_token_files(path),
    open_data=_open_data,
    preview=_preview,
    inspect=_inspect,
    manifests=_manifests,
    most_tokens=_most_tokens,
    first_documents=_first_documents,
)
