"""Short stories in simple English, made from the sentences of `corpus/stories.yaml`.

A small model learns such a language in minutes, and a reader sees at once whether it has: TinyStories
(arXiv:2305.07759) shows it for models of a few million parameters. A story depends on its number alone, so that every
installation has the same text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardwise.base.yaml_and_json import parse_yaml

GRAMMAR = Path(__file__).parent.parent / "corpus" / "stories.yaml"
STORIES = 4000
_SENTENCE_START = re.compile(r"(?:^|[.!?] )\"?[a-z]")
_Choice = TypeVar("_Choice")


def stories() -> Iterator[str]:
    """All stories of the built-in text, in their order."""
    grammar = parse_yaml(GRAMMAR.read_text(encoding="utf-8"), GRAMMAR.name)
    for number in range(STORIES):
        yield _story(grammar, number)


def _story(grammar: Mapping[str, Any], number: int) -> str:
    draw = random.Random(f"story {number}")
    words = _words(grammar, draw)
    plot = _choice(list(grammar["plots"].values()), draw)
    sentences = [_choice(part, draw).format_map(words) for part in plot]
    return " ".join(_SENTENCE_START.sub(lambda start: start[0].upper(), sentence) for sentence in sentences) + "\n"


def _words(grammar: Mapping[str, Any], draw: random.Random) -> dict[str, str]:
    words = {name: _choice(texts, draw) for name, texts in grammar["words"].items()}
    hero = _choice(grammar["people"], draw)
    friend = _choice([person for person in grammar["people"] if person != hero], draw)
    words |= zip(("name", "they", "them", "their"), hero, strict=True)
    words |= zip(("friend", "friend_they", "friend_them", "friend_their"), friend, strict=True)
    words["who"] = "girl" if words["they"] == "she" else "boy"
    words["an_animal"] = f"{'an' if words['animal'][0] in 'aeiou' else 'a'} {words['animal']}"
    return words


def _choice(values: Sequence[_Choice], draw: random.Random) -> _Choice:
    # Of all its functions, `random` promises only for random() that a seed gives the same numbers in every version.
    return values[int(draw.random() * len(values))]
