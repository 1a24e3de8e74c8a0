"""Tokenizers: byte-level BPE trained on the data, or the user's own `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
_SMALLEST = 256 + 1
_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
# What transformers may read beside tokenizer.json; `export` copies those that are there.
_COMPANIONS = (_CONFIG, _SPECIAL, "added_tokens.json", "chat_template.jinja")
# The ends of document of GPT-2 and NeoX, Llama 2, Llama 3 and BERT.
_KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "[SEP]")


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, backend: tokenizers.Tokenizer, end_of_document: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        end = backend.token_to_id(end_of_document)
        assert end is not None
        self._backend = backend
        self.end_of_document = end_of_document
        self.end_of_document_id: int = end
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Opens a `tokenizer.json` or a folder that holds one.

        Raises:
            DataError: when it is missing, unreadable or has no token that ends a document.
        """
        import tokenizers

        file = _tokenizer_file(Path(path))
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
        except Exception as error:
            raise DataError(f"{file} is not a tokenizer that Hugging Face tokenizers can read: {error}") from error
        return cls(backend, _find_end(backend, file))

    def token_id(self, token: str) -> int | None:
        """The id of one token, None where the vocabulary lacks it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """The ids of `text`, nothing added."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, nothing added, on all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text of `ids`; ends of documents show."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes a folder that `transformers.AutoTokenizer.from_pretrained` loads."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        _write_config(folder, self.end_of_document)


def train_tokenizer(texts: Iterable[str], vocab_size: int, name: str) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens: 256 bytes, the end of document, and merges learned from `texts`.

    Raises:
        DataError: when `texts` (called `name`) yield fewer, with the number that they reach.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST:
        raise DataError(
            f"model.vocab_size ({vocab_size}) must be at least {_SMALLEST} (256 bytes and {END_OF_DOCUMENT}) where the "
            "tokenizer is trained on the data; data.tokenizer names your own"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
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
    return Tokenizer(backend, END_OF_DOCUMENT)


def open_user_tokenizer(path: str, vocab_size: int) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, which must fit `model.vocab_size`.

    Raises:
        DataError: when it cannot be opened or has ids beyond the model's vocabulary.
    """
    tokenizer = Tokenizer.load(_existing(path))
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the vocabulary of data.tokenizer {path} ({tokenizer.vocab_size}) must be at most model.vocab_size "
            f"({vocab_size}): set model.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def user_tokenizer_digest(path: str) -> str:
    """A digest of the files that `export_user_tokenizer` copies."""
    digest = hashlib.sha256()
    for file in _files(_existing(path)):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
        digest.update(hashlib.sha256(content).digest() + _target_name(file).encode())
    return digest.hexdigest()


def special_token_ids(folder: Path) -> dict[str, int | None]:
    """`bos_token_id` and `eos_token_id`, as a model's config.json names them; None where the tokenizer has none.

    Raises:
        DataError: as `Tokenizer.load`.
    """
    tokenizer = Tokenizer.load(folder)
    begins = [tokenizer.token_id(token) for token in _named_tokens(_tokenizer_file(folder), "bos_token")]
    return {"bos_token_id": begins[0] if begins else None, "eos_token_id": tokenizer.end_of_document_id}


def export_user_tokenizer(path: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Copies the user's tokenizer into `folder`, with the configuration that transformers needs where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in _files(_existing(path)):
        shutil.copyfile(file, folder / _target_name(file))
    if not (folder / _CONFIG).exists():
        _write_config(folder, tokenizer.end_of_document)


def _write_config(folder: Path, end: str) -> None:
    special = {"bos_token": end, "eos_token": end}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    for name, value in ((_CONFIG, config), (_SPECIAL, special)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(
            f"data.tokenizer ({path}) does not exist on this machine: name a tokenizer.json or a folder that holds "
            "one, or leave it null to train one on the data"
        )
    return found


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        missing = f"the folder {path} holds no tokenizer.json" if path.is_dir() else f"{path} does not exist"
        raise DataError(f"{missing}: a tokenizer is a tokenizer.json or a folder that holds one")
    return file


def _files(path: Path) -> list[Path]:
    file = _tokenizer_file(path)
    own_folder = file.name == "tokenizer.json"
    companions = [file.parent / name for name in _COMPANIONS if own_folder and (file.parent / name).is_file()]
    return [file, *companions]


def _target_name(file: Path) -> str:
    return file.name if file.name in _COMPANIONS else "tokenizer.json"


def _find_end(backend: tokenizers.Tokenizer, file: Path) -> str:
    for token in [*_named_tokens(file, "eos_token"), *_KNOWN_ENDS]:
        if backend.token_to_id(token) is not None:
            return token
    raise DataError(
        f"{file} has no token that ends a document (none of {', '.join(_KNOWN_ENDS)}): name one as eos_token in "
        f"a {_CONFIG} beside a tokenizer.json"
    )


def _named_tokens(file: Path, role: str) -> list[str]:
    """The tokens that the files beside a tokenizer give a role, such as `eos_token`."""
    found: list[str] = []
    for path in _files(file):
        if path.name not in (_CONFIG, _SPECIAL):
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
        token = values.get(role) if isinstance(values, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        found += [token] if isinstance(token, str) else []
    return found
