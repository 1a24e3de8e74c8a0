"""The files of a tokenizer: `tokenizer.json`, or vocabulary files of older programs, and settings next to them.

The readers of vocabulary files in the library `tokenizers` are not used: they strip spaces from tokens, drop ids that
are no integers and refuse empty lines, and so can give other ids than the program that a file was made for.

Settings add tokens to a tokenizer: those that transformers adds, in the same order. `tokenizer_config.json` gives
tokens by their ids (`added_tokens_decoder`); older folders have `added_tokens.json`. Special tokens are named in
`tokenizer_config.json` and, in older folders, in `special_tokens_map.json`.

Functions import `tokenizers` and the readers of rare files, as a dry run comes here and opens no tokenizer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import hub
from shardwise.base.errors import DataError, listing
from shardwise.base.files import reason_of, user_path
from shardwise.base.yaml_and_json import json_value

if TYPE_CHECKING:
    import tokenizers

PIECES = "tokenizer.model"
VOCABULARY = "vocab.json"
MERGES = "merges.txt"
WORDS = "vocab.txt"
TEKKEN = "tekken.json"
SPECIAL = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
END_OF_DOCUMENT = "<|endoftext|>"
BEGIN_MESSAGE = "<|im_start|>"
END_MESSAGE = "<|im_end|>"
"""The marks of ChatML around a message, special tokens of a tokenizer that is trained here on conversations."""
PAIR_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
"""BERT's special tokens, in the order of their ids in a tokenizer that is trained here."""
_ADDED = "added_tokens.json"
# Files that transformers may read next to a vocabulary; an export copies those that are there.
_COMPANIONS = (hub.TOKENIZER_CONFIG, SPECIAL, _ADDED, CHAT_TEMPLATE, "chat_template.json")
_OF_MISTRAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "[SEP]")
"""The ends of document of GPT-2 and NeoX, Llama 2, Llama 3 and BERT."""
# Classes of transformers that read vocab.json and merges.txt as GPT-2 does; others split text by rules of their own.
_GPT2_CLASSES = ("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "PreTrainedTokenizer")
_CONVERT = "write its tokenizer.json by transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
# transformers 5.23 reads a SentencePiece model without its space before a text, and 5.24 one with marks at the ends of
# words with that space (findings/transformers-bare-sentencepiece.sh).
_CONVERT_PIECES = _CONVERT.replace("transformers:", "transformers 5.24 or newer, from a folder with this file alone:")
_CUT_BEFORE = "cut the texts by sentencepiece, and give the tokens as data.path (docs/token-files.md)"
# The mark that SentencePiece puts in place of a space.
SPACE = "▁"
_SHOWN = 6


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of one tokenizer; `vocabulary`: those that it is made of, by their names in transformers."""

    vocabulary: Mapping[str, Path]
    companions: tuple[Path, ...]

    @classmethod
    def find(cls, path: Path) -> TokenizerFiles:
        """The files of the tokenizer in a folder, or of the one that a file belongs to; DataError if one is missing."""
        if path.is_dir():
            return cls._in_folder(path)
        if not path.exists():
            raise DataError(f"{path} does not exist: a tokenizer is {tokenizer_names()}, or a folder that holds one")
        names = next((names for names in hub.TOKENIZERS if path.name.endswith(names)), None)
        if names is None:
            kind = {".model": PIECES, ".tiktoken": PIECES, ".txt": WORDS}.get(path.suffix, hub.TOKENIZER)
            if re.fullmatch(r"tekken.*\.json", path.name):
                kind = TEKKEN
            return cls({kind: path}, ())
        prefix = path.name.removesuffix(next(name for name in names if path.name.endswith(name)))
        files = {name: path.with_name(prefix + name) for name in names}
        if absent := [file.name for file in files.values() if not file.is_file()]:
            raise DataError(f"{path} must have {listing(absent)} beside it: the tokenizer is read from both")
        # Settings have no prefix, so they may be those of another tokenizer in the folder.
        return cls(files, () if prefix else _companions(path.parent))

    @classmethod
    def _in_folder(cls, folder: Path) -> TokenizerFiles:
        try:
            present = {file.name for file in folder.iterdir() if file.is_file()}
        except OSError as error:
            raise DataError(f"{folder} cannot be read: {reason_of(error)}") from None
        for names in hub.TOKENIZERS:
            if present.issuperset(names):
                return cls.find(folder / names[0])
        raise DataError(no_tokenizer_text(f"the folder {folder}", present))

    @property
    def copies(self) -> dict[str, Path]:
        """All files, by the names that they have in an export; chat templates with names of their own come last."""
        files = {file.name if file.parent.name != hub.CHAT_TEMPLATES else f"{hub.CHAT_TEMPLATES}/{file.name}": file
                 for file in self.companions}  # fmt: skip
        return {**self.vocabulary, **files}

    def open(self) -> tokenizers.Tokenizer:
        """The tokenizer itself; DataError if a file is unreadable, broken, or of a kind that is not read here."""
        options = self._settings(hub.TOKENIZER_CONFIG)
        if hub.TOKENIZER in self.vocabulary:
            backend = _open_json(self.vocabulary[hub.TOKENIZER])
        elif VOCABULARY in self.vocabulary:
            backend = _open_merges(self.vocabulary[VOCABULARY], self.vocabulary[MERGES], options)
        elif TEKKEN in self.vocabulary:
            from shardwise.data.tokens.ranked_vocabularies import open_tekken

            file = self.vocabulary[TEKKEN]
            with tokenizers_library_errors(file, "read"):
                backend = open_tekken(read_tokenizer_file(file), file)
        elif PIECES in self.vocabulary:
            backend = _open_pieces(self.vocabulary[PIECES], options)
        else:
            special = [self.named(f"{role}_token") or token for role, token in PAIR_TOKENS.items()]
            backend = _open_words(self.vocabulary[WORDS], options, special)
        self._add_tokens(backend)
        if not backend.get_vocab_size():
            raise DataError(f"{next(iter(self.vocabulary.values()))} must have tokens, and its vocabulary is empty")
        return backend

    def named(self, role: str) -> str | None:
        """The token that the companions give a role, such as `eos_token`, or the vocabulary itself."""
        return self._special_tokens.named(role) or (_OF_MISTRAL.get(role) if TEKKEN in self.vocabulary else None)

    @cached_property
    def _special_tokens(self) -> _SpecialTokens:
        return _SpecialTokens(self._settings(hub.TOKENIZER_CONFIG), self._settings(SPECIAL))

    def end_of_document(self, backend: tokenizers.Tokenizer) -> str | None:
        """The token that closes a document; None if there is none."""
        names = (self.named("eos_token"), *KNOWN_ENDS)
        return next((name for name in names if name is not None and backend.token_to_id(name) is not None), None)

    def _add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        try:
            special = self._special_tokens.all()
            file, by_id = self._tokens_by_id({token.content for token in special})
        except (TypeError, ValueError, AttributeError) as error:
            folder = self.companions[0].parent
            raise DataError(
                f"the files beside the tokenizer in {folder} must give each token as text or with its properties, and "
                f"its id as a number ({error}): write them again by save_pretrained of transformers"
            ) from None
        added = [by_id[number] for number in sorted(by_id)]
        present = {token.content for token in (*added, *backend.get_added_tokens_decoder().values())}
        for token in special:
            if token.content not in present:
                added.append(token)
                present.add(token.content)
        backend.add_tokens(added)
        for number, token in by_id.items():
            if (reached := backend.token_to_id(token.content)) != number:
                raise DataError(
                    f"{file} gives {token.content!r} the id {number}, and in the vocabulary it is {reached}"
                )
        ends = [token for token in KNOWN_ENDS if backend.token_to_id(token) is not None]
        if hub.TOKENIZER in self.vocabulary:
            if self.named("eos_token") is not None or any(
                file.name == hub.TOKENIZER_CONFIG for file in self.companions
            ):
                ends = []
            else:  # an export gets settings, which name this token
                ends = ends[:1]
        _add_special(backend, [token for token in ends if token not in present])

    def _tokens_by_id(self, special: set[str]) -> tuple[Path | None, dict[int, tokenizers.AddedToken]]:
        files = {file.name: file for file in self.companions}
        settings = self._settings(hub.TOKENIZER_CONFIG)
        if BY_ID in settings:
            by_id = {int(number): _added_token(token) for number, token in settings[BY_ID].items()}
            return files[hub.TOKENIZER_CONFIG], by_id
        if _ADDED not in files:
            return None, {}
        tokens = {
            number: _added_token(token, special=token in special, normalized=token not in special)
            for token, number in _ids(files[_ADDED]).items()
        }
        return files[_ADDED], tokens

    def _settings(self, name: str) -> dict[str, Any]:
        return next((read_tokenizer_json(path) for path in self.companions if path.name == name), {})


@contextlib.contextmanager
def tokenizers_library_errors(name: Path | str, verb: str) -> Iterator[None]:
    """Inside, whatever the library `tokenizers` raises is a DataError: it cannot `verb` the tokenizer `name`."""
    try:
        yield
    except BaseException as error:
        # Its Rust code panics at an expression that takes too many steps: an error that is no Exception.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise DataError(f"{name} is not a tokenizer that Hugging Face tokenizers can {verb}: {error}") from error


def _add_special(backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    import tokenizers

    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens])


def _companions(folder: Path) -> tuple[Path, ...]:
    files = [folder / name for name in _COMPANIONS if (folder / name).is_file()]
    return (*files, *sorted((folder / hub.CHAT_TEMPLATES).glob("*.jinja")))


def _open_json(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if (backend := _open_tiktoken(file)) is not None:
        return backend
    text = _text(file)
    with tokenizers_library_errors(file, "read"):
        return tokenizers.Tokenizer.from_str(text)


def _open_tiktoken(file: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of a vocabulary of tiktoken; None if the file is none. DataError if it is not known."""
    content = read_tokenizer_file(file)
    if not re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content[:1024]):
        return None
    from shardwise.data.tokens.ranked_vocabularies import open_tiktoken

    if (known := open_tiktoken(content)) is None:
        raise DataError(
            f"{file} is a vocabulary of tiktoken, which says neither how text is split nor the ids of special tokens: "
            f"take the {hub.TOKENIZER} of a model with that encoding, which the hub has"
        )
    return known


def _open_words(file: Path, options: Mapping[str, Any], special: Iterable[str]) -> tokenizers.Tokenizer:
    """WordPiece from one token a line, as BERT's; lower-cased unless `tokenizer_config.json` says otherwise."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = {token: number for number, token in enumerate(_lines(file))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=PAIR_TOKENS["unk"]))
    _add_special(backend, [token for token in special if token in vocabulary])
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=options.get("do_lower_case", True),
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    sep = PAIR_TOKENS["sep"]
    cls = PAIR_TOKENS["cls"]
    if {sep, cls} <= vocabulary.keys():
        backend.post_processor = processors.BertProcessing((sep, vocabulary[sep]), (cls, vocabulary[cls]))
    return backend


def _open_merges(file: Path, merges_file: Path, options: Mapping[str, Any]) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    kind = str(options.get("tokenizer_class", _GPT2_CLASSES[0])).removesuffix("Fast")
    if kind not in _GPT2_CLASSES:
        raise DataError(f"{file} is a {kind}'s, which splits text by rules of its own: {_CONVERT}")
    vocabulary = _ids(file)
    if missing := [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in vocabulary]:
        raise DataError(f"{file} lacks {len(missing)} of the 256 bytes, and text with them would be lost")
    pairs = [line.split(" ") for line in _lines(merges_file) if line and not line.startswith("#version")]
    if bad := [pair for pair in pairs if len(pair) != 2]:
        raise DataError(f"{merges_file} must have two tokens with a space between them a line, and has {bad[0]}")
    with tokenizers_library_errors(merges_file, "read"):
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, [(left, right) for left, right in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(options.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    return backend


def _open_pieces(file: Path, options: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A SentencePiece model such as Llama's: BPE over all of the text at once, bytes for characters that it lacks."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors

    if (backend := _open_tiktoken(file)) is not None:
        return backend
    proto = _piece_model(file)
    kinds = type(proto).SentencePiece
    if problems := _unreadable_pieces(proto):
        is_read_elsewhere = proto.trainer_spec.model_type != type(proto.trainer_spec).WORD
        is_read_elsewhere &= not proto.trainer_spec.treat_whitespace_as_suffix
        advice = _CONVERT_PIECES if is_read_elsewhere else _CUT_BEFORE
        raise DataError(f"{file} must be a model such as Llama's, and {listing(problems)}: {advice}")
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
    # The model has no merges: sentencepiece joins any two neighbours whose union is a piece, the best score first.
    merges = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                merges.append((piece[:cut], piece[cut:]))
    vocabulary = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    _add_special(backend, [piece.piece for piece in proto.pieces if piece.type == kinds.CONTROL])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Replace(" ", SPACE)
    if proto.normalizer_spec.add_dummy_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), backend.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    begin = proto.trainer_spec.bos_piece
    if options.get("add_bos_token", True) and begin in vocabulary:
        backend.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", begin, "$B"], special_tokens=[(begin, vocabulary[begin])]
        )
    return backend


def _piece_model(file: Path) -> Any:
    try:
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise DataError(
            f"{file} is read by sentencepiece, which is not installed: pip install 'shardwise[sentencepiece]'"
        ) from None
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    with contextlib.suppress(DecodeError):
        model.ParseFromString(read_tokenizer_file(file))
    if not model.pieces or not model.HasField("trainer_spec"):
        raise DataError(f"{file} is no SentencePiece model: copy it again, or take the model's {hub.TOKENIZER}")
    return model


def _unreadable_pieces(model: Any) -> list[str]:
    """The properties of a model that would give other ids here than in sentencepiece."""
    kinds = type(model).SentencePiece
    trained = model.trainer_spec
    normal = model.normalizer_spec
    known = (kinds.NORMAL, kinds.UNKNOWN, kinds.CONTROL, kinds.BYTE)
    pieces = {piece.piece for piece in model.pieces if piece.type == kinds.NORMAL}
    letters = {letter for piece in pieces for letter in piece}
    problems = {
        "it is no BPE": trained.model_type != type(trained).BPE,
        "it has no pieces for bytes": not trained.byte_fallback,
        "it has symbols of the user's own": any(piece.type not in known for piece in model.pieces),
        "it has pieces with characters that are no pieces themselves": not letters <= pieces,
        "it rewrites characters": bool(normal.precompiled_charsmap),
        "it drops spaces": normal.remove_extra_whitespaces,
        "it keeps spaces as they are": not normal.escape_whitespaces,
        "it marks the ends of words": trained.treat_whitespace_as_suffix,
    }
    return [text for text, is_so in problems.items() if is_so]


def _ids(file: Path) -> dict[str, int]:
    values = read_tokenizer_json(file)
    if any(type(number) is not int or number < 0 for number in values.values()):
        raise DataError(f'{file} must hold tokens and their ids, such as {{"the": 1}}')
    if len(set(values.values())) < len(values):
        raise DataError(f"{file} gives one id to two tokens")
    return values


def _lines(file: Path) -> list[str]:
    return [line.removesuffix("\r") for line in _text(file).removesuffix("\n").split("\n")]


def read_tokenizer_file(file: Path) -> bytes:
    """The content of a tokenizer's file; DataError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {reason_of(error)}") from None


def _text(file: Path) -> str:
    try:
        return read_tokenizer_file(file).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} must be UTF-8, and byte {error.start} is not: copy it again") from None


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """The JSON object in a tokenizer's file; DataError if it holds none."""
    try:
        values = json_value(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path} must hold a JSON object")
    return values


BY_ID = "added_tokens_decoder"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The keys of further special tokens, in newer and in older releases of transformers.
_EXTRA = "extra_special_tokens"
_ADDITIONAL = "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class _SpecialTokens:
    """The special tokens that two files name.

    Args:
        older: content of `special_tokens_map.json`, which goes first, but is ignored if `tokenizer_config.json` has an
            `added_tokens_decoder`.
    """

    def __init__(self, config: Mapping[str, Any], older: Mapping[str, Any]) -> None:
        older = {} if BY_ID in config else older
        self._values = {**config, **older}
        extra = config.get(_EXTRA) or config.get(_ADDITIONAL) or older.get(_EXTRA) or older.get(_ADDITIONAL) or []
        # They are a list, or have roles of their own; `all` refuses anything else.
        self._extra: Any = extra.values() if isinstance(extra, dict) else extra

    def named(self, role: str) -> str | None:
        """The token of a role, such as `eos_token`."""
        return token_content(self._values.get(role))

    def all(self) -> list[tokenizers.AddedToken]:
        """All special tokens; TypeError if the files do not describe them."""
        other_roles = [key for key in self._values if key.endswith("_token") and key not in ROLES]
        values = [self._values.get(role) for role in (*ROLES, *other_roles)]
        values += [*self._extra]
        return [_added_token(value, special=True) for value in values if token_content(value) is not None]


def _added_token(value: Any, **flags: bool) -> tokenizers.AddedToken:
    import tokenizers

    if (content := token_content(value)) is None:
        raise TypeError(f"{value!r} is no token")
    given = {flag: value[flag] for flag in _FLAGS if isinstance(value, dict) and flag in value}
    return tokenizers.AddedToken(content, **{**given, **flags})


def token_content(value: object) -> str | None:
    """The text of a token, which files of tokenizers give as text or with its flags; None if the value is no token."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def resolve_tokenizer(named: str, *, cached: bool = False, announce: Callable[[str], None] | None = None) -> Path:
    """The file or folder that `data.tokenizer` names, see `hub.fetch_or_open`; a hub id may end in `@REVISION`."""
    return hub.fetch_or_open(place_of_tokenizer(named), cached=cached, announce=announce)


def place_of_tokenizer(named: str) -> Path | hub.HubFiles:
    """The path that `data.tokenizer` names, else the files that it names on the hub; ConfigError if it is neither."""
    path = user_path(named)
    if path.exists():
        return path
    key = f"data.tokenizer ({named})"
    repository, revision = hub.split_revision(named, key)
    is_file = path.suffix in (".json", ".txt", ".model")
    hub.require_hub_id(repository, path, f"{key} must be a tokenizer's file or folder", is_file=is_file)
    return hub.HubFiles(
        "data.tokenizer", repository, revision, (*hub.TOKENIZER_FILES, *hub.LICENCES),
        lacking=lambda names: None if hub.holds_tokenizer(names) else no_tokenizer_text(key, names),
        verified=True,
    )  # fmt: skip


def tokenizer_names() -> str:
    """The files that can be a tokenizer, for messages."""
    return listing([" with ".join(kind) for kind in hub.TOKENIZERS], "or")


def no_tokenizer_text(shown: str, names: Iterable[str]) -> str:
    """The message for a folder, called `shown`, whose files `names` include no tokenizer."""
    contents = f"it has {listing(sorted(names), most=_SHOWN)}" if names else "it is empty"
    return f"{shown} must hold a tokenizer, which is {tokenizer_names()}: {contents}"
