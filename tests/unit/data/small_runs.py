"""Small runs whose data differ, and what comes of preparing these."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.config import Config, config_from_sections
from shardwise.data import cache
from shardwise.data.formats.prepared_data import PreparedData, make_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer


def config(
    vocab_size: int = 300, length: int = 16, eval_every: int = 0, *, family: str = "llama", **data: Any
) -> Config:
    """A run of these data; `batch`, `steps`, `evaluation` and `hooks` among them are keys of other sections."""
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 8, "num_attention_heads": 4}
    train = {"steps": data.pop("steps", 1), "global_batch": data.pop("batch", 2), "micro_batch": 1}
    sections = {name: data.pop(name, None) or {} for name in ("evaluation", "hooks")}
    return config_from_sections(
        {
            "model": {"family": family, "vocab_size": vocab_size, "max_position_embeddings": 4096, **sizes},
            "train": {**train, "sequence_length": length, "eval_every": eval_every},
            "optimizer": {"lr": 1e-3},
            "data": data,
            **sections,
        }
    )


def sized(vocab_size: int, length: int, eval_every: int, **data: Any) -> Config:
    """A run of the tiny text, unless others are named."""
    return config(vocab_size, length, eval_every, **{"dataset": "tiny", **data})


def batches_of(chosen: Config, root: Path, part: Any = "train") -> Any:
    return make_batches(chosen, prepare_data(chosen, root), part)


def refusals(chosen: Config, root: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        prepare_data(chosen, root)
    return caught.value.problems


def refusal(chosen: Config, root: Path) -> str:
    (problem,) = refusals(chosen, root)
    assert "\n" not in problem, "one sentence"
    return problem


def text_of(data: PreparedData, tokens: np.ndarray) -> str:
    return Tokenizer.load(data.tokenizer_path).decode(tokens)


def stories() -> list[str]:
    """The texts of `data.dataset=tiny`."""
    path = Path(cache.__file__).parent / "corpus" / "tiny.jsonl"
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def fill(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Files of these names and contents in a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def saved_rows(at: Path, **columns: Any) -> Path:
    """A folder of the library `datasets`."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(at)
    return at


def saved_tokenizer(folder: Path, text: str, size: int, **options: bool) -> str:
    train_tokenizer([text], size, "test", **options).save(folder)
    return str(folder)
