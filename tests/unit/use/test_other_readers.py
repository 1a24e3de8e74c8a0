"""The record of programs that read a model, and what `checkpoint export --for` and `--gguf` make of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.config.model import FAMILIES
from shardwise_use import gguf_file, other_readers
from shardwise_use.importing.hugging_face import open_hugging_face
from tests.e2e.command import within
from tests.hugging_face import save
from tests.unit.use.importing.checks import write

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


def model(family: str, **keys: Any) -> Any:
    return FAMILIES[family].model_validate({"family": family, **SIZES, **keys})


def test_every_family_was_tried_with_five_programs() -> None:
    record = other_readers.reader_record()
    assert set(record["lines"]) == set(FAMILIES)
    assert {"transformers", "gguf", "llama.cpp", "mlx-lm", "ctranslate2", "vllm"} <= set(record["readers"])
    for family, of_family in record["lines"].items():
        assert len(of_family[other_readers.PLAIN]) >= 5, family
        assert all(
            other_readers.is_computed_right(results.get("transformers", {"by": 0})) for results in of_family.values()
        ), family


def test_what_a_program_computes_wrongly_is_refused() -> None:
    assert other_readers.require_readable(model("mistral"), "mlx-lm") == ()
    with pytest.raises(ConfigError) as caught:
        other_readers.require_readable(model("mistral", sliding_window=8), "mlx-lm")
    by = other_readers.reader_record()["lines"]["mistral"]["sliding_window"]["mlx-lm"]["by"]
    assert str(caught.value).startswith(
        "mlx-lm 0.32.2 must compute what the model does, and its log-probabilities of mistral with "
        f"model.sliding_window (8) are off by {by:.2g}; right with it: transformers"
    )
    with pytest.raises(ConfigError, match=r"refuses olmo2 with default values \(ValueError: No conver.*\); "):
        other_readers.require_readable(model("olmo2", num_key_value_heads=2), "ctranslate2")
    with pytest.raises(ConfigError, match=r"--for \(mlx\) must be a program that models were tried with: did you mean"):
        other_readers.require_readable(model("llama"), "mlx")


def test_the_command_refuses_before_it_writes(tmp_path: Path) -> None:
    save("mistral", tmp_path / "saved")
    write(open_hugging_face(Root.of(tmp_path / "saved")), tmp_path / "ours")
    for options, said in (
        (("out", "--for", "mlx-lm"), "of mistral with model.sliding_window (5) are off by "),
        (("out", "--for", "vlm"), "--for (vlm) must be a program that models were tried with: did you mean vllm?"),
        (("s3://b/out", "--gguf"), "DEST (s3://b/out) must be a path"),
        (("out.gguf", "--gguf", "--for", "mlx-lm"), "--push and --for must be left out"),
    ):
        failed = within("checkpoint", "export", tmp_path / "ours/step-00000000", *options, at=tmp_path)
        assert (failed.code, said in failed.err) == (2, True), failed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "saved"]


def test_rows_in_the_order_of_llama_cpp() -> None:
    heads = np.arange(2 * 6)[:, None]
    assert gguf_file._neighbours(heads, head_dim=6).ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    fused = np.arange(2 * 3 * 2)
    assert gguf_file._by_kind(fused, heads=2).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert gguf_file._plus_one(np.zeros(2, np.float32), np.float32(3)).tolist() == [3, 3]
