"""A `tokenizer.json` in the terms of llama.cpp: tokens, their types, merges or scores, and a splitting rule by name.

llama.cpp splits text by rules that it knows by name, and its own converter finds the name of a tokenizer by a hash of
ids, so that it refuses each tokenizer that is not on its list. Here the rule of the file is compared itself. What
llama.cpp would read into other ids is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.data.tokens.tokenizer_files import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's types of tokens (`llama_token_type`)."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BY_EXPRESSION = {
    (_WORDS + r"\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_WORDS + r"\p{N}{1,3}" + _REST, False): "dbrx",
    (_WORDS + r"\p{N}" + _REST, False): "qwen2",
    (_GPT2, False): "gpt-2",
}
"""Expression that splits a text, and whether a piece that is a token by itself is not merged → llama.cpp's name."""


@dataclass(frozen=True)
class GGUFVocabulary:
    """A tokenizer as a GGUF file has it."""

    model: str  # `gpt2` (bytes and merges) or `llama` (pieces with scores)
    pre: str  # name of the rule that splits text, for `gpt2`
    tokens: Sequence[str]  # the tokens in the order of their ids, as many as the model has rows
    types: Sequence[int]
    merges: Sequence[str] = ()  # pairs with a space between them, for `gpt2`
    scores: Sequence[float] = ()  # the score of each token, for `llama`
    has_space_prefix: bool = False  # true if a space is put before a text
    notes: tuple[str, ...] = ()


def gguf_vocabulary(described: Mapping[str, Any], vocab_size: int) -> GGUFVocabulary:
    """The GGUF vocabulary of a `tokenizer.json`; ConfigError: llama.cpp has none that gives the same ids."""
    model = described["model"]
    if model.get("type", "BPE") != "BPE":
        raise _refused(f"it is of type {model['type']}, and only BPE is written")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _refused("its tokens have marks within words or at their ends")
    ids: dict[str, int] = model["vocab"]
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, number in ids.items():
        if number < vocab_size:
            tokens[number], types[number] = token, NORMAL
    for added in described["added_tokens"]:
        if any(added[side] for side in ("lstrip", "rstrip", "single_word")):
            raise _refused(f"its token {added['content']!r} takes the spaces beside it, or must be a word")
        if (number := added["id"]) >= vocab_size:
            raise _refused(f"its token {added['content']!r} ({number}) is beyond the model's vocabulary ({vocab_size})")
        tokens[number], types[number] = added["content"], CONTROL if added["special"] else USER_DEFINED
    pairs = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
    if model.get("byte_fallback"):
        scores, has_prefix = _pieces(described, ids, pairs, types)
        return GGUFVocabulary("llama", "default", tokens, types, scores=scores, has_space_prefix=has_prefix)
    notes: tuple[str, ...] = ()
    if (normalizer := described["normalizer"]) is not None:
        if normalizer != {"type": "NFC"}:
            raise _refused(f"it rewrites text ({normalizer['type']}) before it splits it")
        notes = ("llama.cpp does not bring text into Unicode's form NFC, as this tokenizer does",)
    pre = _splitting_rule(described["pre_tokenizer"], bool(model.get("ignore_merges")))
    return GGUFVocabulary("gpt2", pre, tokens, types, [" ".join(pair) for pair in pairs], notes=notes)


def _splitting_rule(pre_tokenizer: Mapping[str, Any] | None, ignores_merges: bool) -> str:
    steps = [pre_tokenizer or {"type": "no pre_tokenizer"}]
    steps = steps[0].get("pretokenizers", steps)
    *first, last = steps
    has_plain_bytes = last["type"] == "ByteLevel" and not last.get("add_prefix_space")
    expression = _GPT2 if last.get("use_regex", True) else ""
    name = None
    if has_plain_bytes and not first:
        name = _BY_EXPRESSION.get((expression, ignores_merges))
    elif has_plain_bytes and len(first) == 1 and first[0]["type"] == "Split" and not expression:
        (split,) = first
        if split["behavior"] == "Isolated" and not split["invert"]:
            name = _BY_EXPRESSION.get((split["pattern"].get("Regex", ""), ignores_merges))
    elif has_plain_bytes and len(first) == 1 and first[0] == {"type": "Digits", "individual_digits": True}:
        name = "smollm" if expression and not ignores_merges else None
    if name is None:
        raise _refused(f"no rule of llama.cpp splits text as its pre_tokenizer does ({' and '.join(_kinds(steps))})")
    return name


def _pieces(
    described: Mapping[str, Any], ids: Mapping[str, int], pairs: Sequence[tuple[str, ...]], types: list[int]
) -> tuple[list[float], bool]:
    """The scores of pieces, and whether a space is put before a text; the types of bytes are set.

    llama.cpp joins the neighbours whose union has the best score, whatever they are; a score here is the rank of the
    first merge into the piece. So each two pieces whose union is a piece must be a merge, and those into one piece
    neighbours in rank.
    """
    normalizer = described["normalizer"] or {}
    steps = [{key: step[key] for key in step if key != "type"} for step in normalizer.get("normalizers", [normalizer])]
    spaces = {"pattern": {"String": " "}, "content": SPACE}
    if steps not in ([spaces], [{"prepend": SPACE}, spaces]):
        raise _refused("it rewrites other text than spaces")
    if (pre := described["pre_tokenizer"]) is not None and pre.get("pattern") != {"String": " "}:
        raise _refused(f"it splits text by {' and '.join(_kinds([pre]))}, and llama.cpp joins pieces over all of it")
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        piece = "".join(pair)
        if piece in ranks and "".join(pairs[rank - 1]) != piece:
            raise _refused(f"its merges into {piece!r} have others between them")
        ranks.setdefault(piece, rank)
    known = set(pairs)
    added = {token["content"] for token in described["added_tokens"]}
    pieces = {piece for piece in ids if piece not in added and not _is_byte(piece)}
    for piece in pieces:
        for cut in range(1, len(piece)):
            pair = (piece[:cut], piece[cut:])
            if pair not in known and pieces.issuperset(pair):
                raise _refused(f"it does not join {pair[0]!r} and {pair[1]!r}, whose union is a token")
    scores = [0.0] * len(types)
    for piece, number in ids.items():
        if number < len(types):
            scores[number] = -float(ranks.get(piece, 0))
            if _is_byte(piece):
                types[number] = BYTE
    unknown = described["model"].get("unk_token")
    if unknown in ids:
        types[ids[unknown]] = UNKNOWN
    return scores, len(steps) == 2


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _kinds(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{step['type']}{step.get('pattern') or ''}" for step in steps]


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer cannot be written for llama.cpp, which would give other ids: {reason}; export without --gguf, "
        "for a reader that takes tokenizer.json as it is"
    )
