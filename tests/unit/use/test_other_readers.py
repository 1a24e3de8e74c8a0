"""Other programs: a record of what they compute, `checkpoint export --for`, and `--gguf` (tests/interop)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.config.model import FAMILIES
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise_use import gguf_file, other_readers
from shardwise_use.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, gguf_vocabulary
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


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    trained = train_tokenizer(["to be or not to be " * 9] * 3, 262, "text")
    described: dict[str, Any] = json.loads(trained._backend.to_str())
    return described


def pieces(*merges: str, tokens: tuple[str, ...] = ("a", "b", "c", "ab", "abc")) -> dict[str, Any]:
    """A tokenizer as Llama 2's."""
    prefix = {"type": "Prepend", "prepend": "▁"}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    vocabulary = {name: number for number, name in enumerate(["<unk>", *BYTES, *tokens])}
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": [*merges], "vocab": vocabulary}
    normalizer = {"type": "Sequence", "normalizers": [prefix, spaces]}
    return {"model": model, "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": None}


def test_tokenizers_are_written_where_llama_cpp_has_their_rules(own: dict[str, Any]) -> None:
    written = gguf_vocabulary(own, 270)
    assert (written.model, written.pre, written.notes) == ("gpt2", "gpt-2", ())
    assert (written.tokens[0], written.types[0], written.types[1]) == ("<|endoftext|>", CONTROL, NORMAL)
    assert (written.tokens[262:264], written.types[262:]) == (["[PAD262]", "[PAD263]"], [UNUSED] * 8)
    assert [merge.count(" ") for merge in written.merges] == [1] * (262 - 257)
    assert gguf_vocabulary(own | {"normalizer": {"type": "NFC"}}, 270).notes == (
        "llama.cpp does not bring text into Unicode's form NFC, as this tokenizer does",
    )
    written = gguf_vocabulary(pieces("a b", "ab c"), 270)
    assert (written.model, written.has_space_prefix) == ("llama", True)
    assert [written.types[number] for number in (0, 1, 256, 257)] == [UNKNOWN, BYTE, BYTE, NORMAL]
    assert written.scores[257:262] == [0, 0, 0, 0, -1]
    for change, reason in (
        ({"normalizer": {"type": "Lowercase"}}, r"it rewrites text \(Lowercase\) before it splits it"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "no rule of llama.cpp splits text"),
        ({"model": {"type": "Unigram"}}, "it is of type Unigram, and only BPE is written"),
        ({"model": {"type": "BPE", "end_of_word_suffix": "</w>"}}, "its tokens have marks within words or"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            gguf_vocabulary(own | change, 270)
        assert str(caught.value).endswith("export without --gguf, for a reader that takes tokenizer.json as it is")


def test_pieces_that_would_be_joined_otherwise_are_refused() -> None:
    for described, reason in (
        (pieces("a b"), "it does not join 'ab' and 'c', whose union is a token"),
        (pieces("b c", "a b", "a bc", "ab c", tokens=("a", "b", "c", "ab", "bc", "abc")), None),
        (pieces("b c", "a bc", "a b", "ab c", tokens=("a", "b", "c", "ab", "bc", "abc")), "have others between them"),
        (pieces("a b", "ab c") | {"normalizer": None}, "it rewrites other text than spaces"),
        (pieces("a b", "ab c") | {"pre_tokenizer": {"type": "Whitespace"}}, "it splits text by Whitespace, and lla"),
    ):
        if reason is None:
            assert gguf_vocabulary(described, 270).model == "llama"
            return
        with pytest.raises(ConfigError, match=reason):
            gguf_vocabulary(described, 270)
