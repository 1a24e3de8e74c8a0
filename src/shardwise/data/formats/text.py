"""Text: tokenized once, cached by its content, and mapped into memory."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import DataError, listing, raise_problems
from shardwise.base.progress import progress
from shardwise.base.units import count, counted, size
from shardwise.config import DataConfig
from shardwise.data import cache
from shardwise.data.formats import prepared_data
from shardwise.data.formats.data_format import DataFormat, FirstDocuments, Inspection, LengthStatistics
from shardwise.data.reading.text_sources import (
    ColumnSource,
    FileSource,
    Source,
    TextPiece,
    announce_empty,
    open_text_source,
)
from shardwise.data.request import Announce, DataRequest
from shardwise.data.rows import PART_NAMES, PARTS, Flags, IntArray, PairTokens, Part, part_sizes_text
from shardwise.data.samples.order import mix_bits, mix_integer
from shardwise.data.tokens import encoding
from shardwise.data.tokens.tokenizer import Tokenizer, keep_user_tokenizer, load_tokenizer, train_tokenizer

# Characters that a tokenizer is trained on: more text changes the merges of a small vocabulary little and costs memory
# and time.
_TOKENIZER_CHARACTERS = 1 << 25
# A document larger than this fraction of the held-out share is never held out: whether the last one still fits then
# changes the share by a quarter at most.
_LARGEST_HELD_OUT = 1 / 4
# Below this fraction of the share the documents are too few or too long, and the end of the text is held out instead.
# Documents of at most a quarter of the share always reach it, unless there are too few of them.
_LEAST_HELD_OUT = 3 / 4
# An inspection takes seconds: about the most characters that it reads and encodes.
_TEXT_CHARACTERS = 1 << 26
_ENCODED_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class TextSplit:
    """The division of a text into a training and an evaluation part."""

    # True for each document that is evaluated, [documents]; None if the end of the text is evaluated.
    held_out: Flags | None
    boundary: int  # character of the text at which the held-out end begins, if `held_out` is None

    def parts(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[Part, TextPiece]]:
        """Each piece with its part; the piece with the boundary becomes two, cut at the next line if there is one."""
        if self.held_out is not None:
            document = 0
            for piece in pieces:
                yield ("eval" if self.held_out[document] else "train"), piece
                document += piece.ends_document
            return
        start = 0
        for piece in pieces:
            end = start + len(piece.text)
            if end <= self.boundary:
                yield "train", piece
            elif start >= self.boundary:
                yield "eval", piece
            else:
                cut = self.boundary - start
                line = piece.text.find("\n", cut) + 1
                if 0 < line < len(piece.text):
                    cut = line
                yield "train", TextPiece(piece.text[:cut], ends_document=False)
                yield "eval", TextPiece(piece.text[cut:], piece.ends_document)
            start = end


def plan_text_split(characters: IntArray, weights: Sequence[float]) -> TextSplit:
    """The split that holds out the evaluation share, the second weight's, of documents of these lengths.

    Documents are taken in the order of a hash of their number, so that the choice is spread over the text and is the
    same on every machine, for as long as the sum of their lengths stays within the share.
    """
    total = int(characters.sum())
    share = int(total * (weights[1] / sum(weights)))
    if share == 0:
        return TextSplit(None, total)
    order = np.argsort(mix_bits(np.arange(len(characters), dtype=np.uint64)), kind="stable")
    order = order[characters[order] <= _LARGEST_HELD_OUT * share]
    taken = order[np.cumsum(characters[order]) <= share]
    if int(characters[taken].sum()) < _LEAST_HELD_OUT * share:
        return TextSplit(None, total - share)
    held_out = np.zeros(len(characters), dtype=np.bool_)
    held_out[taken] = True
    return TextSplit(held_out, total)


_ONE_PART = TextSplit(None, sys.maxsize)


@dataclass(frozen=True)
class TextScan:
    """The digest and the size of a text, or of conversations, and the length of each document, [documents]."""

    content: str
    bytes: int
    characters: IntArray


def open_text(request: DataRequest, source: Source | None = None) -> prepared_data.PreparedText:
    """Opens `source`, or the text of `request`, tokenizing it first if the data cache has no tokens of it."""
    if request.data.streaming:
        from shardwise.data.formats import streamed_text

        return streamed_text.open_stream(request)
    source = source or open_text_source(request.data)
    content, scan = digest_of_text(request, source.stamp(), source, lambda: _scan(source, request.announce))
    entry = prepared_data.open_text_tokens(
        request,
        source.name,
        lambda tokenizer: _key(content, request, tokenizer),
        lambda folder: _build(folder, source, scan or _scan(source), request),
    )
    data = _prepared(entry, source, request)
    if request.data.packs_documents:
        from shardwise.data.formats import packing_cache

        return packing_cache.with_packed_samples(request, data)
    return data


def digest_of_text(
    request: DataRequest, stamp: str | None, source: Source, scan: Callable[[], TextScan]
) -> tuple[str, TextScan | None]:
    """The digest of a source's text, and the scan by which it was found; None if the data cache knew the digest."""
    # Entries are keyed by content, so that a copy of a text finds them too. Files that have not changed since they were
    # read are not read again to find their content.
    root = request.root
    content = cache.known_text_digest(root, stamp)
    if content is not None:
        return content, None
    with contextlib.ExitStack() as lock:
        if isinstance(source, ColumnSource):
            # One process reads it, as a data set of the hub is fetched first; the others wait.
            lock.enter_context(cache.lock_entry(root, source.stamp()[:32]))
            content = cache.known_text_digest(root, stamp)
            if content is not None:
                return content, None
            if request.announce is not None:
                request.announce(f"preparing the data {source.name}: reading them")
        scanned = scan()
        cache.remember_text_digest(root, stamp, scanned.content)
    return scanned.content, scanned


def _scan(source: Source, announce: Announce = None) -> TextScan:
    digest = encoding.ContentDigest()
    document = 0
    characters = array("q")
    with progress("reading", shown=announce is not None, done=lambda: digest.bytes):
        for _, piece in _parts(source, _ONE_PART, digest):
            document += len(piece.text)
            if piece.ends_document:
                characters.append(document)
                document = 0
    announce_empty(source, announce)
    return TextScan(digest.hexdigest(), digest.bytes, np.array(characters, dtype=np.int64))


def _parts(source: Source, split: TextSplit, digest: encoding.ContentDigest) -> Iterator[tuple[Part, TextPiece]]:
    """All pieces of a text with their parts: the data set's own if `data.split` names them, else those of `split`."""
    if not isinstance(source, ColumnSource) or not source.data.split_names:
        yield from split.parts(digest.watch(source.pieces()))
        return
    for part, name in zip(PART_NAMES, source.splits, strict=False):
        for piece in digest.watch(source.pieces_of(name)):
            yield part, piece
        digest.end_part()


def _key(content: str, request: DataRequest, tokenizer: str | None) -> str:
    weights = request.data.split_weights
    described: dict[str, Any] = {
        "content": content,
        "split": list(request.data.split_names) or weights[1] / sum(weights),
        "tokenizer": prepared_data.tokenizer_key(tokenizer),
        "vocab_size": request.vocab_size,
        **request.data.chosen_marks,
    }
    if request.in_pairs:
        described["sentences"] = encoding.RULE
    return cache.cache_key(described)


def _build(folder: Path, source: Source, scan: TextScan, request: DataRequest) -> dict[str, Any]:
    announce = request.announce
    if announce is not None and isinstance(source, FileSource) and request.data.path is not None:
        announce(f"preparing the data {source.name}: {source.described()}")
    split = plan_text_split(scan.characters, request.data.split_weights)
    named = request.data.tokenizer
    pairs = request.in_pairs
    if named is None:
        read = encoding.ContentDigest()
        texts = _tokenizer_texts(_parts(source, split, read), int(scan.characters.sum()))
        with progress("training a tokenizer", scan.bytes, shown=announce is not None, done=lambda: read.bytes):
            tokenizer = train_tokenizer(texts, request.vocab_size, source.name, pairs=pairs)
        tokenizer.save(folder / "tokenizer")
    else:
        tokenizer = keep_user_tokenizer(named, request.vocab_size, folder / "tokenizer", announce, pairs=pairs)
    digest = encoding.ContentDigest()
    pieces = _parts(source, split, digest)
    with progress("tokenizing", scan.bytes, shown=announce is not None, done=lambda: digest.bytes):
        if pairs:
            parts = encoding.encode_sentences(pieces, tokenizer, folder)
        else:
            parts = encoding.encode_documents(
                pieces, tokenizer, encoding.document_marks(request.data, tokenizer), folder
            )
    # The text was read twice: to find its content and lengths, and to encode it.
    prepared_data.require_unchanged(source.name, digest.hexdigest(), scan.content)
    # Without splits the test part is empty, and fingerprints from before there was one must stay.
    fingerprinted = {part: facts for part, facts in parts.items() if part != "test" or request.data.split_names}
    manifest = {
        "dtype": cache.token_dtype(tokenizer.vocab_size).str,
        "vocab_size": tokenizer.vocab_size,
        "content": scan.content,
        "bytes": scan.bytes,
        "documents": len(scan.characters),
        **parts,
        "tokenizer": cache.tokenizer_digest(folder / "tokenizer"),
        "fingerprint": cache.data_fingerprint([scan.content, *encoding.part_digests(fingerprinted)]),
    }
    if pairs:
        manifest["pair_tokens"] = asdict(tokenizer.pair_tokens())
    return manifest


def _tokenizer_texts(parts: Iterable[tuple[Part, TextPiece]], characters: int) -> Iterator[str]:
    """Training text, thinned by a hash of the piece's number to about as much as a tokenizer needs.

    Of `characters`, the share `_TOKENIZER_CHARACTERS / characters` of the pieces is taken, and all of a smaller text.
    """
    for number, (part, piece) in enumerate(parts):
        if part == "train" and mix_integer(number) % characters < _TOKENIZER_CHARACTERS:
            yield piece.text


def _prepared(entry: cache.CacheEntry, source: Source, request: DataRequest) -> prepared_data.PreparedText:
    facts = entry.manifest
    special = None
    sentences = {}
    if request.in_pairs:
        special = PairTokens(**facts["pair_tokens"])
        sentences = {part: entry.sentences(part) for part in PARTS}
    problems = prepared_data.padding_problems(special, request) + prepared_data.too_short_parts(
        request, entry, source.name, request.needed_parts
    )
    raise_problems(DataError, problems)
    sizes = {part: facts[part]["tokens"] for part in PARTS}
    bytes_per_token = facts["bytes"] / max(1, sum(sizes.values()))
    summary = (
        f"{source.name}: {size(facts['bytes'])}, {counted(facts['documents'], 'document')}, {part_sizes_text(sizes)} "
        f"tokens, vocabulary {facts['vocab_size']:,}, {bytes_per_token:.2f} bytes per token"
    )
    if isinstance(source, FileSource):
        summary += source.left_out_note()
    return prepared_data.PreparedText(
        entry.tokenizer_path,
        facts["fingerprint"],
        summary,
        tokens={part: entry.tokens(part) for part in PARTS},
        vocab_size=facts["vocab_size"],
        sentences=sentences,
        pair_tokens=special,
    )


def _preview(request: DataRequest) -> str:
    source = open_text_source(request.data)
    time = preparation_time(request)
    if not isinstance(source, FileSource):
        return f"built-in, {time}"
    source.require_text()
    total = sum(file.stat().st_size for file in source.files)
    return f"{counted(len(source.files), 'file')}, {size(total)}, {source.described()}, {time}"


def _most_tokens(request: DataRequest, limit: int) -> int | None:
    """The bytes of the files, as a token has one at least; None where files are packed, or pairs repeat sentences."""
    source = open_text_source(request.data)
    if not isinstance(source, FileSource) or request.in_pairs:
        return None
    return source.bytes_within(limit)


def preparation_time(request: DataRequest) -> str:
    if request.data.streaming:
        return "read during training"
    return "prepared when the run starts, unless the cache has it"


def _beginning(source: Source, characters: int) -> tuple[list[str], bool]:
    """The first documents of a text, of about so many characters, and True if it has no more; the last may be cut."""
    documents: list[str] = []
    blocks: list[str] = []
    seen = 0
    for piece in source.pieces():
        if seen >= characters:
            return [*documents, *filter(None, ["".join(blocks)])], False
        blocks.append(piece.text)
        seen += len(piece.text)
        if piece.ends_document:
            documents.append("".join(blocks))
            blocks = []
    return documents, True


def _tokens(documents: list[str], tokenizer: Tokenizer, data: DataConfig) -> tuple[IntArray, IntArray]:
    marks = encoding.document_marks(data, tokenizer)
    tokens, sizes = marks.put(*tokenizer.encode_rows(documents), [True] * len(documents), begun=False)
    return tokens.astype(np.int64), sizes


def files_of_source(source: Source) -> tuple[Sequence[Path], str]:
    """The files of a data source that are the user's, and the way in which they are read."""
    if isinstance(source, FileSource):
        return source.files, source.described()
    if not isinstance(source, ColumnSource):
        return (), "built-in"
    return [Path(file) for names in source.files_by_split().values() for file in names], "a data set"


def inspect_text(data: DataConfig, samples: int) -> Inspection:
    """An inspection of files of text, as training reads them: all of them, or the beginning of large ones."""
    from shardwise.data.formats import inspections

    given = [f"data.{key}" for key in ("append_eod", "prepend_bos") if getattr(data, key) is not None]
    if given and data.tokenizer is None:
        raise DataError(f"{given[0]} needs data.tokenizer, by which tokens are counted")
    source = open_text_source(data)
    documents, is_complete = _beginning(source, _TEXT_CHARACTERS)
    files, described = files_of_source(source)
    notes: list[str] = []
    announce_empty(source, notes.append)
    lengths = np.array([*map(len, documents)])
    nbytes = sum(len(document.encode()) for document in documents)
    number = len(documents) if is_complete else None
    limit = "" if is_complete else f" in the first {size(nbytes)} of text"
    counts: dict[str, Any] = {
        "files": len(files),
        "documents": number,
        "looked_at": len(documents),
        "bytes_looked_at": nbytes,
    }
    rows = [
        ("files", f"{len(files):,}, {described}"),
        ("documents", f"{len(documents):,}{limit}"),
        ("characters", f"{count(int(lengths.sum()))}{limit}"),
    ]
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(data.tokenizer)
        first = documents[: 1 + int(np.searchsorted(np.cumsum(lengths), _ENCODED_CHARACTERS))]
        first[-1] = first[-1][:_ENCODED_CHARACTERS]
        bytes_per_token = sum(len(text.encode()) for text in first) / len(_tokens(first, tokenizer, data)[0])
        counts["bytes_per_token"] = bytes_per_token
        rows.append(("tokens", f"about {count(nbytes / bytes_per_token)}{limit}, {bytes_per_token:.2f} bytes each"))
        marks = encoding.document_marks(data, tokenizer)
        verbs = {"begins with": marks.begin, "ends with": marks.end}
        shown = [f"{verb} {tokenizer.decode([token])}" for verb, token in verbs.items() if token is not None]
        rows.append(("a document", listing(shown) or "has no tokens of its own around it"))
    return Inspection(
        source.name,
        "text",
        sum(path.stat().st_size for path in files),
        rows,
        counts,
        LengthStatistics.of("characters of a document", lengths, number),
        inspections.inspected_texts(documents[:samples]),
        notes=notes,
    )


def _first_documents(data: DataConfig) -> FirstDocuments:
    if data.tokenizer is None:
        raise DataError(f"{data.name} is text, whose samples need data.tokenizer")
    documents, is_all = _beginning(open_text_source(data), _ENCODED_CHARACTERS)
    tokens, sizes = _tokens(documents, load_tokenizer(data.tokenizer), data)
    return FirstDocuments(tokens, np.concatenate([[0], np.cumsum(sizes)]), is_all)


# Any path may be text, which is what no other format is at.
FORMAT = DataFormat(
    name="text",
    contents="text",
    open_data=open_text,
    preview=_preview,
    inspect=inspect_text,
    most_tokens=_most_tokens,
    first_documents=_first_documents,
)
