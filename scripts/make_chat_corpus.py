"""Writes src/shardwise/data/corpus/chat.jsonl: small conversations about the people of the corpus tiny.

They are made of the same people, trades and places, by `random.Random.random` alone, so that they are the same on every
run. A trade always makes the same goods with the same tool: answers can be learned, and others be read in the question.

    python scripts/make_chat_corpus.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from scripts.make_tiny_corpus import PEOPLE, PLACES, TRADES

TARGET = Path(__file__).resolve().parent.parent / "src/shardwise/data/corpus/chat.jsonl"
CONVERSATIONS = 300
SEED = 20240229
SYSTEM = "You answer in one short sentence."
FACTS = (
    ("What does a {trade} make?", "A {trade} makes {goods}."),
    ("What does a {trade} work with?", "A {trade} works with the {tool}."),
    ("Who makes {goods}?", "The {trade} makes {goods}."),
    ("Who works with the {tool}?", "The {trade} works with the {tool}."),
)
INTRODUCTIONS = (
    ("My name is {name}, and I am a {trade}.", "Hello, {name} the {trade}!"),
    ("{name} is a {trade} in the {place}.", "So {name} makes {goods} in the {place}."),
)
QUESTIONS = (
    (
        ("What do I make?", "You make {goods}, {name}."),
        ("What is my name?", "Your name is {name}."),
    ),
    (
        ("Where does {name} work?", "{name} works in the {place}."),
        ("What does {name} make?", "{name} makes {goods}."),
    ),
)


def conversation(draws: random.Random) -> list[dict[str, str]]:
    """The messages of a conversation: one or two questions about a trade, or about a person who was introduced."""

    def pick(choices):  # type: ignore[no-untyped-def]
        return choices[int(draws.random() * len(choices))]

    phrases = [phrase for line in TRADES.splitlines() for phrase in line.split("  ")]
    trade, goods, tool = pick(phrases).split("|")
    slots = {"trade": trade, "goods": goods, "tool": tool, "name": pick(" ".join(PEOPLE.values()).split())}
    slots["place"] = pick([place for line in PLACES.splitlines() for place in line.split("|")])
    turns = [pick(FACTS)]
    if draws.random() < 0.5:
        kind = int(draws.random() * len(INTRODUCTIONS))
        turns = [INTRODUCTIONS[kind], pick(QUESTIONS[kind])]
    messages = [{"role": "system", "content": SYSTEM}] if draws.random() < 0.3 else []
    for question, answer in turns:
        messages.append({"role": "user", "content": question.format(**slots)})
        messages.append({"role": "assistant", "content": answer.format(**slots)})
    return messages


def corpus() -> str:
    """The whole file."""
    draws = random.Random(SEED)
    lines = [json.dumps({"messages": conversation(draws)}, ensure_ascii=False) for _ in range(CONVERSATIONS)]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(corpus(), encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes, {CONVERSATIONS} conversations")
