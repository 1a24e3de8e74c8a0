"""Small preparations: a text, its tokenizer, and what is made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from shardwise.config import DataConfig
from shardwise.data.prepare import from_text
from shardwise.data.prepare.from_text import TextConversionJob, convert_text
from shardwise.data.prepare.output import PreparationOutcome
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from tests.unit.data.small_runs import json_lines

WORDS = ["the", "ring", "of", "keys", "was", "lost", "in", "spring", "and", "a", "song", "went", "with", "it"]


def texts(number: int, seed: int = 0) -> list[str]:
    """Documents of 1 to 6 sentences."""
    generator = np.random.default_rng(seed)
    return [
        " ".join(" ".join(generator.choice(WORDS, 8)).capitalize() + "." for _ in range(generator.integers(1, 7)))
        for _ in range(number)
    ]


@dataclass
class Told:
    """What the user was told, and bytes of the text that were tokenized or skipped."""

    lines: list[str] = field(default_factory=list)
    advanced: int = 0

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None = None, noun: str = "") -> Iterator[Callable[[int], None]]:
        def advance(amount: int) -> None:
            self.advanced += amount if what.startswith("tokenizing") else 0

        yield advance


@dataclass(frozen=True)
class Folder:
    """Where a test works: `text.jsonl` of `documents`, and `tokenizer`."""

    at: Path
    documents: list[str]

    @classmethod
    def fill(cls, at: Path, number: int = 60) -> Folder:
        found = cls(at, texts(number))
        json_lines(at / "text.jsonl", found.documents)
        train_tokenizer(found.documents, 300, "test", pairs=True).save(at / "tokenizer")
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.at / "tokenizer")

    def job(self, output: str, source: str = "text.jsonl", **options: bool) -> TextConversionJob:
        data = DataConfig(path=str(self.at / source))
        options = {"append_eod": True, "split_sentences": False} | options
        return TextConversionJob(data, self.at / output, str(self.at / "tokenizer"), options)

    def run(self, job: TextConversionJob, *, force: bool = False, told: Told | None = None) -> PreparationOutcome:
        told = Told() if told is None else told
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(from_text, "progress", told.progress)
            return convert_text(job, force=force, announce=told.lines.append)

    def index(self, output: str) -> tuple[bytes, bytes]:
        """The bytes of Megatron's two files."""
        return (self.at / f"{output}.bin").read_bytes(), (self.at / f"{output}.idx").read_bytes()

    def left(self, output: str) -> dict[str, bytes]:
        """All files whose path begins so, by their path."""
        return {
            str(path.relative_to(self.at)): path.read_bytes()
            for path in sorted(self.at.rglob("*"))
            if path.is_file() and str(path.relative_to(self.at)).startswith(output)
        }
