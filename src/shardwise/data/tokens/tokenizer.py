"""Tokenizers: byte-level BPE trained on the data, or the user's own."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.base.errors import ConfigError, DataError, listing, raise_problems, see
from shardwise.base.hub import TOKENIZER, TOKENIZER_CONFIG
from shardwise.data.rows import Int32Array, IntArray, Integers, PairTokens
from shardwise.data.tokens import tokenizer_files

if TYPE_CHECKING:
    import tokenizers

LARGEST_TRAINED = 2**20
"""Largest vocabulary of a tokenizer that is trained here: the trainer reserves memory for all of it at its start."""
_APPLY = "apply to a text"
PLAIN_CLASS: Mapping[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""The class of transformers that reads a `tokenizer.json` and nothing else.

Others take its vocabulary and merges alone, and split text by rules of their own, so that a text may have other ids.
"""


class Tokenizer:
    """Text to token ids and back.

    Args:
        end_of_document: token that closes a document; None if the vocabulary has none.
        pair_names: names of BERT's special tokens in this tokenizer, by the keys of `PAIR_TOKENS`; None if unknown.
        begin_of_document: token that a text begins with, as files next to the tokenizer say; None if they do not.

    Attributes:
        dropout: probability at which the tokenizer's file asks to leave out a merge of its BPE; None if it does not.
            No merge is left out here, so that a text always has the same tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_of_document: str | None,
        pair_names: Mapping[str, str] | None = None,
        begin_of_document: str | None = None,
        name: str = "the tokenizer",
    ) -> None:
        # A tokenizer.json may ask for both, which would lose text and add tokens.
        backend.no_truncation()
        backend.no_padding()
        self.dropout: float | None = getattr(backend.model, "dropout", None)
        if self.dropout is not None:
            backend.model.dropout = None
        self._backend = backend
        self._name = name
        self.end_of_document = end_of_document
        self.end_of_document_id = None if end_of_document is None else backend.token_to_id(end_of_document)
        self.pair_names = pair_names
        self._begin_of_document = begin_of_document
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Opens the tokenizer of a folder, or the one that a file belongs to; DataError: it is missing or broken."""
        return cls._of(tokenizer_files.TokenizerFiles.find(Path(path)))

    @classmethod
    def _of(cls, files: tokenizer_files.TokenizerFiles) -> Tokenizer:
        backend = files.open()
        name = str(next(iter(files.vocabulary.values())))
        return cls(backend, files.end_of_document(backend), begin_of_document=files.named("bos_token"), name=name)

    @cached_property
    def digest(self) -> str:
        """A digest of all that decides which ids a text has; `save` does not change it."""
        # The decoder and the post-processor do not change the ids of a text, and `save` may write them otherwise.
        described = json.loads(self._backend.to_str())
        parts = {key: described[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def required_end(self) -> int:
        """The id of the token that closes a document; DataError if there is none."""
        if self.end_of_document_id is None:
            raise DataError(
                f"{self._name} has no token that ends a document (none of {', '.join(tokenizer_files.KNOWN_ENDS)}): "
                f"name one as eos_token in a {TOKENIZER_CONFIG} beside it, or set data.append_eod=false"
            )
        return self.end_of_document_id

    @property
    def note(self) -> str | None:
        """The difference between the tokenizer's file and the way it is read, for the user; None if there is none."""
        if self.dropout is None:
            return None
        return f"the tokenizer's BPE dropout ({self.dropout:g}) is off: a text always becomes the same tokens"

    @property
    def added_tokens(self) -> dict[int, str]:
        """The tokens beyond the vocabulary of the model, and special ones, by their ids."""
        return {number: token.content for number, token in self._backend.get_added_tokens_decoder().items()}

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def token_of(self, number: int) -> str | None:
        """The token of an id; None if the vocabulary lacks it."""
        if not 0 <= number < self.vocab_size:  # the library takes no number below 0
            return None
        return self._backend.id_to_token(number)

    def encode(self, text: str) -> IntArray:
        """The ids of `text`, nothing added."""
        return np.array(self.encoding(text).ids, dtype=np.int64)

    def encoding(self, text: str) -> tokenizers.Encoding:
        """All that the library says about the tokens of `text`, nothing added."""
        self._read_special_tokens(literally=False)
        with tokenizer_files.tokenizers_library_errors(self._name, _APPLY):
            return self._backend.encode(text, add_special_tokens=False)

    def encodings(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """The same of all texts, on all cores."""
        self._read_special_tokens(literally=False)
        with tokenizer_files.tokenizers_library_errors(self._name, _APPLY):
            return self._backend.encode_batch(texts, add_special_tokens=False)

    def _read_special_tokens(self, *, literally: bool) -> None:
        # Set only if it differs, as it must not be set while another thread encodes.
        if self._backend.encode_special_tokens != literally:
            self._backend.encode_special_tokens = literally

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that is to be continued, after the tokens that the tokenizer puts before a text (`<s>`).

        Tokens that it puts after a text are left out.
        """
        plain = self.encoding(text).ids
        with tokenizer_files.tokenizers_library_errors(self._name, _APPLY):
            with_marks = self._backend.encode(text, add_special_tokens=True).ids
        for start in range(len(with_marks) - len(plain) + 1):
            if with_marks[start : start + len(plain)] == plain:
                return [*with_marks[:start], *plain]
        return [*plain]

    @property
    def begin_of_text(self) -> str | None:
        """The token that `encode_prompt` puts before a text; None if it puts none."""
        prompt = self.encode_prompt("a")
        if len(prompt) == len(self.encode("a")):
            return None
        return self._backend.id_to_token(prompt[0])

    @property
    def begin_of_document(self) -> str | None:
        """The token that a document may begin with, such as `<s>`; None if the tokenizer has none."""
        return self.begin_of_text or self._begin_of_document

    def encode_rows(self, texts: list[str], *, literally: bool = False) -> tuple[Int32Array, IntArray]:
        """All ids of texts, and the number of each; `literally`: the name of a special token is text like any other."""
        self._read_special_tokens(literally=literally)
        with tokenizer_files.tokenizers_library_errors(self._name, _APPLY):
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        sizes = np.fromiter(map(len, encodings), np.int64, len(encodings))
        # From an iterator, as lists of Python integers take nine times the memory of the array.
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(ids, np.int32, int(sizes.sum())), sizes

    def byte_counts(self) -> IntArray:
        """UTF-8 bytes of the text that each id stands for, [vocabulary]; 0 for special tokens.

        The text is the normalized one, with the space that some tokenizers put before it.
        """
        described = json.loads(self._backend.to_str())
        is_byte_level = '"ByteLevel"' in json.dumps([described["decoder"], described["pre_tokenizer"]])
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._backend.get_vocab(with_added_tokens=False).items():
            # A byte-level vocabulary has one character for each byte.
            counts[number] = len(token) if is_byte_level else _bytes_of_piece(token)
        for number, added in self._backend.get_added_tokens_decoder().items():
            counts[number] = 0 if added.special else len(added.content.encode())
        return counts

    def decode(self, ids: Iterable[int] | Integers, *, skips_special: bool = False) -> str:
        """The text of `ids`; ends of documents and other special tokens show unless `skips_special` leaves them out."""
        with tokenizer_files.tokenizers_library_errors(self._name, _APPLY):
            return self._backend.decode([int(i) for i in ids], skip_special_tokens=skips_special)

    def save(self, folder: Path, copies: Mapping[str, Path] | None = None) -> None:
        """Writes a folder that `transformers.AutoTokenizer.from_pretrained` loads.

        Args:
            copies: files that the tokenizer was read from, by their names in the folder; only the other files that
                transformers needs are made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        copies = copies or {}
        for name, file in copies.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)
        if TOKENIZER not in copies or self.dropout is not None:
            (folder / TOKENIZER).write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        end = self.end_of_document
        pairs = self.pair_names is not None
        # No text becomes the last one, which some programs require: bytes are never unknown. GPT-2's files have it too.
        unknown = None if copies else end
        names = {"bos_token": self.begin_of_document or end, "eos_token": end, "unk_token": unknown}
        if self.pair_names is not None:
            names = {f"{role}_token": name for role, name in self.pair_names.items()}
        special = {role: name for role, name in names.items() if name is not None}
        settings = {**PLAIN_CLASS, "add_prefix_space": False, "clean_up_tokenization_spaces": False, **special}
        if TOKENIZER_CONFIG in copies:
            if not pairs:
                special = {"eos_token": end} if end is not None and end in self.added_tokens.values() else {}
            settings = plain_tokenizer_config(
                {**special, **tokenizer_files.read_tokenizer_json(copies[TOKENIZER_CONFIG])}, pairs=pairs
            )
        elif tokenizer_files.SPECIAL not in copies:
            (folder / tokenizer_files.SPECIAL).write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def pair_tokens(self) -> PairTokens:
        """The ids of BERT's special tokens, for a tokenizer that was trained or opened for sentence pairs."""
        assert self.pair_names is not None
        ids: dict[str, Any] = {role: self.token_id(name) for role, name in self.pair_names.items()}
        return PairTokens(**ids)


def load_tokenizer(named: str, *, cached: bool = False) -> Tokenizer:
    """The tokenizer that a path or a hub id names; `cached`: without a request. ConfigError: it cannot be opened."""
    return Tokenizer.load(tokenizer_files.resolve_tokenizer(named, cached=cached))


def plain_tokenizer_config(settings: Mapping[str, Any], *, pairs: bool) -> dict[str, Any]:
    """Settings by which transformers reads `tokenizer.json` as it is; `pairs`: for a model of sentence pairs."""
    inputs = {} if pairs else {"model_input_names": ["input_ids", "attention_mask"]}
    kept = {name: value for name, value in settings.items() if name != "auto_map"}  # which names a class in a file
    return {**inputs, **kept, **PLAIN_CLASS}


def _bytes_of_piece(piece: str) -> int:
    """The UTF-8 bytes of the text of a piece of SentencePiece, in which ▁ stands for a space, and <0x0A> for a byte."""
    is_byte = re.fullmatch(r"<0x[0-9A-F]{2}>", piece) is not None
    return 1 if is_byte else len(piece.replace(tokenizer_files.SPACE, " ").encode())


def trained_special_tokens(vocab_size: int, *, pairs: bool, chat: bool = False) -> list[str]:
    """The special tokens of a tokenizer that is trained on the data; DataError: the vocabulary is too small or big."""
    special = [tokenizer_files.END_OF_DOCUMENT]
    if pairs:
        special = list(tokenizer_files.PAIR_TOKENS.values())
    elif chat:
        special = [tokenizer_files.BEGIN_MESSAGE, tokenizer_files.END_MESSAGE]
    smallest = 256 + len(special)
    if smallest <= vocab_size <= LARGEST_TRAINED:
        return special
    limit = f"at most {LARGEST_TRAINED}"
    if vocab_size < smallest:
        limit = f"at least {smallest} (256 bytes and {listing(special)})"
    raise DataError(
        f"model.vocab_size ({vocab_size}) must be {limit} where the tokenizer is trained on the data; data.tokenizer "
        "names your own"
    )


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, name: str, *, pairs: bool = False, chat: bool = False
) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens: special ones, 256 bytes, and merges learned from `texts`.

    The special tokens are the end of document; for sentence pairs BERT's, [PAD] is 0; for conversations the marks of
    ChatML.

    Raises:
        DataError: `texts` (called `name`) yield fewer tokens; the message has the number that they reach.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    special = trained_special_tokens(vocab_size, pairs=pairs, chat=chat)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # Merges that occur once would be learned by heart; the alphabet is sorted, as its order decides the ids of bytes.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    reached = backend.get_vocab_size(with_added_tokens=True)
    if reached != vocab_size:
        raise DataError(
            f"model.vocab_size ({vocab_size}) must be at most {reached}, the vocabulary that {name} has text for: "
            f"set model.vocab_size={reached} or lower, give more text, or name your own tokenizer by data.tokenizer"
        )
    if chat:
        return Tokenizer(backend, tokenizer_files.END_MESSAGE, begin_of_document=tokenizer_files.BEGIN_MESSAGE)
    if not pairs:
        return Tokenizer(backend, tokenizer_files.END_OF_DOCUMENT)
    sep = tokenizer_files.PAIR_TOKENS["sep"]
    cls = tokenizer_files.PAIR_TOKENS["cls"]
    backend.post_processor = processors.BertProcessing((sep, special.index(sep)), (cls, special.index(cls)))
    return Tokenizer(backend, sep, tokenizer_files.PAIR_TOKENS)


def open_user_tokenizer(path: str, vocab_size: int, *, pairs: bool = False) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, here or in the hub's cache; DataError: it does not fit the model."""
    files = _files(path)
    tokenizer = Tokenizer._of(files)
    problems = []
    if tokenizer.vocab_size > vocab_size:
        added = [f"{token!r} ({number})" for number, token in tokenizer.added_tokens.items() if number >= vocab_size]
        beyond = f", which has room for {listing(added, most=3)} too" if added else ""
        problems.append(
            f"the vocabulary of data.tokenizer {path} ({tokenizer.vocab_size}) must be at most model.vocab_size "
            f"({vocab_size}): set model.vocab_size={tokenizer.vocab_size}{beyond}"
            f"{see('data#vocabulary-too-small')}"
        )
    if pairs:
        names = {role: files.named(f"{role}_token") or usual for role, usual in tokenizer_files.PAIR_TOKENS.items()}
        if missing := [name for name in names.values() if tokenizer.token_id(name) is None]:
            problems.append(
                f"data.tokenizer {path} has no {listing(missing, 'or')}: model.family=bert needs "
                f"{listing(names.values())}; other names are read from a {TOKENIZER_CONFIG} beside it"
                f"{see('data#no-marks-of-pairs')}"
            )
        tokenizer.pair_names = names
    raise_problems(DataError, problems)
    return tokenizer


def announce_tokenizer_note(tokenizer: Tokenizer, announce: Callable[[str], None] | None) -> None:
    """Announces the note of a tokenizer, if it has one."""
    if announce is not None and tokenizer.note is not None:
        announce(tokenizer.note)


def user_tokenizer_digest(path: str) -> str:
    """A digest of the files that `export_user_tokenizer` copies; DataError if there are none, or one is unreadable."""
    digest = hashlib.sha256()
    for name, file in _files(path).copies.items():
        digest.update(hashlib.sha256(tokenizer_files.read_tokenizer_file(file)).digest() + name.encode())
    return digest.hexdigest()


def special_token_ids(folder: Path) -> dict[str, int | None]:
    """The tokenizer's ids `bos_token_id` and `eos_token_id`, as config.json names them; None if it has none."""
    tokenizer = Tokenizer.load(folder)
    begin = tokenizer_files.TokenizerFiles.find(folder).named("bos_token")
    return {
        "bos_token_id": None if begin is None else tokenizer.token_id(begin),
        "eos_token_id": tokenizer.end_of_document_id,
    }


def export_user_tokenizer(path: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Copies the tokenizer of `data.tokenizer` into `folder`, with the files that transformers needs besides.

    Whatever its kind is, `folder` then has a `tokenizer.json` that gives the same ids.
    """
    tokenizer.save(folder, _files(path).copies)


def keep_user_tokenizer(
    path: str, vocab_size: int, folder: Path, announce: Callable[[str], None] | None, *, pairs: bool = False
) -> Tokenizer:
    """Opens the user's tokenizer as `open_user_tokenizer` does, announces its note, and exports it into `folder`."""
    tokenizer = open_user_tokenizer(path, vocab_size, pairs=pairs)
    announce_tokenizer_note(tokenizer, announce)
    export_user_tokenizer(path, tokenizer, folder)
    return tokenizer


def _files(path: str) -> tokenizer_files.TokenizerFiles:
    try:
        return tokenizer_files.TokenizerFiles.find(tokenizer_files.resolve_tokenizer(path, cached=True))
    except ConfigError as error:
        raise DataError(error.problems) from None
