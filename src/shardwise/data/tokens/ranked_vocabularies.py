"""Byte-level BPE from vocabularies of ranks: Mistral's tekken.json, and files of tiktoken, a token and its rank a line.

A file of tiktoken says neither how text is split nor the ids of special tokens: those that are known are told by their
digest. BPE joins the neighbours whose union has the lowest rank; a token that is a whole piece is taken as it is.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import DataError
from shardwise.base.yaml_and_json import json_value

if TYPE_CHECKING:
    import tokenizers

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_LLAMA = {
    0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id",
    8: "eom_id", 9: "eot_id", 10: "python_tag",
}  # fmt: skip
_reserved = (number for number in range(256) if number not in _LLAMA)
_LLAMA |= {place: f"reserved_special_token_{number}" for number, place in enumerate(_reserved)}
_TIKTOKEN: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": (_GPT2, {_END: 50256}),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": (_GPT2, {_END: 50256}),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": (
        _CL100K,
        {_END: 100257, **_FIM, "<|endofprompt|>": 100276},
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": (
        _O200K,
        {_END: 199999, "<|endofprompt|>": 200018},
    ),
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": (
        _CL100K,
        {f"<|{name}|>": 128000 + place for place, name in _LLAMA.items()},
    ),
}
"""SHA-256 of r50k_base, p50k_base, cl100k_base, o200k_base and Llama 3's tokenizer.model → the pattern that splits
text, and the special tokens."""
_TEKKEN = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of a tekken.json that lists none, by their ids."""


def open_tekken(content: bytes, file: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tekken.json; DataError if the content is another."""
    try:
        described: dict[str, Any] = json_value(content)
        config = described["config"]
        listed = described.get("special_tokens")
        rows = [] if listed is None else sorted(listed, key=lambda row: row["rank"])
        names = [*_TEKKEN] if listed is None else [row["token_str"] for row in rows]
        reserved = config.get("default_num_special_tokens", len(names))
        names += [f"<SPECIAL_{number}>" for number in range(len(names), reserved)]
        size = config.get("default_vocab_size")
        # The file may have more tokens than the vocabulary.
        kept = described["vocab"][: None if size is None else size - reserved]
        ranks = {base64.b64decode(row["token_bytes"], validate=True): rank for rank, row in enumerate(kept)}
        return _byte_level(ranks, reserved, config["pattern"], {name: place for place, name in enumerate(names)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is no tekken.json of Mistral ({error!r}): copy it again") from None


def open_tiktoken(content: bytes) -> tokenizers.Tokenizer | None:
    """The tokenizer of a file of tiktoken; None if it is not known how that splits text."""
    known = _TIKTOKEN.get(hashlib.sha256(content).hexdigest())
    if known is None:
        return None
    rows = [line.split() for line in content.splitlines() if line]
    return _byte_level({base64.b64decode(token): int(rank) for token, rank in rows}, 0, *known)


def _byte_level(
    ranks: Mapping[bytes, int], first: int, pattern: str, special: Mapping[str, int]
) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary of ranks, from the id `first` on; the expression `pattern` splits text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # The letter of a byte in a byte-level vocabulary: its own if that can be seen, else one from 256 on.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    remaining = [byte for byte in range(256) if byte not in seen]
    letters = {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(remaining)}
    shown = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        halves = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        halves.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(shown[left], shown[right]) for left, right in halves]
    vocabulary = {shown[token]: rank + first for token, rank in ranks.items()} | {**special}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    backend.decoder = decoders.ByteLevel()
    by_id = sorted(special, key=special.__getitem__)
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in by_id])
    return backend
