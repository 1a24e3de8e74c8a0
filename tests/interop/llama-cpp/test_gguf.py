"""GGUF files of shardwise, as llama.cpp reads them: the ids of texts, and log-probabilities.

tests/interop/readers has the log-probabilities of every family.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from shardwise.base.errors import RunError
from shardwise.base.registered import provided
from shardwise.checkpoint.format.export_checkpoint import Export
from shardwise.checkpoint.storage.root import Root
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from shardwise_use.gguf_file import GGUFExport
from shardwise_use.importing.hugging_face import open_hugging_face
from shardwise_use.importing.imported_model import write_imported_checkpoint

CORPUS = Path(provided.__code__.co_filename).parents[1] / "data/corpus/tiny.jsonl"
TEXTS = [json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()]
LLAMA = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
MARKS = [
    "'s", "'S", "'ll", "’s", "1234567", "٣٤٥", "½", "Ⅷ", "éü", "e\u0301", "日本語", "नमस्ते", "🙂👩\u200d🔬", "\t",
    "\r\n", "\n\n ", "   ", "\u00a0", "\u3000", "_", "--", "a.b", "x²", "ß", "İ", "\u200b", "don't", "HELLO", "C++",
    "<|endoftext|", " \n",
]  # fmt: skip
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3 = LETTERS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def texts(count: int) -> list[str]:
    """Sentences of the corpus with marks of every kind between them."""
    draw = random.Random(1)
    words = " ".join(TEXTS[:50]).split()
    return [
        "".join(draw.choice([draw.choice(words) + " ", draw.choice(MARKS), " "]) for _ in range(draw.randrange(1, 30)))
        for _ in range(count)
    ]


def checkpoint(folder: Path, tokenizer: Tokenizer | None) -> Root:
    """A checkpoint with a Llama of random weights, norms and biases, and a tokenizer."""
    end = None if tokenizer is None else tokenizer.end_of_document_id
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(bos_token_id=None, eos_token_id=end, **LLAMA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float(parameter.dim() == 1 and name.endswith("weight")), 0.05)
    model.save_pretrained(folder / "source")
    if tokenizer is not None:
        tokenizer.save(folder / "source")
    foreign = open_hugging_face(Root.of(folder / "source"))
    return write_imported_checkpoint(foreign, Root.of(folder / "checkpoints")).folder


def opened(file: Path, **options: Any) -> llama_cpp.Llama:
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(str(file), n_ctx=128, n_threads=1, logits_all=True, verbose=False, **exact, **options)


def difference(file: Path, folder: Path, ids: list[int]) -> float:
    """The largest difference of a log-probability between llama.cpp and transformers."""
    model = opened(file)
    model.eval(ids)
    found = torch.log_softmax(torch.tensor(np.array(model.scores[: len(ids)])), -1)
    with torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder).float()(torch.tensor([ids])).logits[0]
    return float((found - torch.log_softmax(reference, -1)).abs().max())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 390, "the corpus")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_formats(tmp_path: Path, dtype: str, tokenizer: Tokenizer) -> None:
    """Against the same weights in a folder; vectors stay in float32."""
    import gguf

    folder = checkpoint(tmp_path, tokenizer)
    GGUFExport(folder, dtype).write(tmp_path / "model.gguf")
    Export(folder, dtype).write(Root.of(tmp_path), "model")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == {"bfloat16": "BF16", "float16": "F16"}[dtype]
    assert {kinds["output_norm.weight"], kinds["blk.0.attn_q.bias"]} == {"F32"}
    assert difference(tmp_path / "model.gguf", tmp_path / "model", tokenizer.encode(TEXTS[0]).tolist()[:40]) < 0.02


def trained(split: Any, *, ignore_merges: bool = False, normalizer: Any = None) -> Tokenizer:
    """A byte-level tokenizer that splits text by `split`."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>"]
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=390, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    backend.normalizer = normalizer
    return Tokenizer(backend, "<|endoftext|>")


def by_expression(expression: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizers_of_all_kinds(kind: str) -> Tokenizer:
    from tokenizers import pre_tokenizers

    plain_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "chat":
        return train_tokenizer(TEXTS, 390, "the corpus", chat=True)
    if kind == "smollm":
        return trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain_bytes]))
    if kind == "pieces":
        return pieces()
    return {
        "own": lambda: train_tokenizer(TEXTS, 390, "the corpus"),
        "llama-bpe": lambda: trained(by_expression(LLAMA3), ignore_merges=True),
        "dbrx": lambda: trained(by_expression(LLAMA3)),
        "qwen2": lambda: trained(by_expression(LLAMA3.replace("{1,3}", ""))),
    }[kind]()


def pieces() -> Tokenizer:
    """Pieces of sentencepiece with bytes for unknown characters, as Llama 2's."""
    import sentencepiece

    with tempfile.TemporaryDirectory() as folder:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=f"{folder}/tokenizer", vocab_size=390, model_type="bpe",
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        )  # fmt: skip
        return Tokenizer.load(f"{folder}/tokenizer.model")


@pytest.mark.parametrize("kind", ["own", "chat", "smollm", "llama-bpe", "dbrx", "qwen2", "pieces"])
def test_texts_have_the_same_ids(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizers_of_all_kinds(kind)
    folder = checkpoint(tmp_path, tokenizer)
    GGUFExport(folder).write(tmp_path / "model.gguf")
    model = opened(tmp_path / "model.gguf", vocab_only=True)
    samples = [*texts(4000), *TEXTS[:1500]]
    differing = [
        text for text in samples
        if model.tokenize(text.encode(), add_bos=False, special=True) != tokenizer.encode(text).tolist()
    ]  # fmt: skip
    assert not differing, f"{len(differing)} of {len(samples)}: {differing[:3]}"
    special = tokenizer.end_of_document or ""
    assert (
        model.tokenize(f"a{special}b".encode(), add_bos=False, special=True)
        == tokenizer.encode(f"a{special}b").tolist()
    )
    assert model.token_eos() == tokenizer.end_of_document_id
    assert model.n_vocab() == 400


def test_a_training_is_served(tmp_path: Path) -> None:
    """`shardwise train`, `checkpoint export --gguf`, and llama.cpp continues a text as transformers does."""
    keys = ["train.steps=30", "train.eval_every=0", "log.sample_tokens=0", "model.vocab_size=512"]

    def shardwise(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardwise", *words], cwd=tmp_path, check=False, capture_output=True, text=True
        )

    assert shardwise("train", "quickstart", *keys, "--nproc", "2", "--run-dir", "run").returncode == 0
    said = shardwise("checkpoint", "export", "run", "model.gguf", "--gguf", "--dtype", "float32")
    assert said.returncode == 0, said.stderr
    assert "model.gguf: step 30, " in said.stdout
    assert (
        shardwise("checkpoint", "export", "run", "model", "--dtype", "float32", "--for", "ctranslate2").returncode == 0
    )
    again = shardwise("checkpoint", "export", "run", "model.gguf", "--gguf")
    assert (again.returncode, "model.gguf exists already" in again.stderr) == (2, True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("Mira was a shepherd in the garden of the duke.")["input_ids"]
    assert difference(tmp_path / "model.gguf", tmp_path / "model", ids) < 1e-3
    model = opened(tmp_path / "model.gguf")
    assert model.tokenize(b"Mira was a shepherd in the garden of the duke.", add_bos=False, special=True) == ids


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    planned = GGUFExport(checkpoint(tmp_path, tokenizer))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"model.gguf cannot be written: No space left on device; nothing is left of it"):
        planned.write(tmp_path / "model.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "source"]


def test_without_a_tokenizer_ids_are_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, None)
    (note,) = GGUFExport(folder).write(tmp_path / "model.gguf")
    assert note == "the checkpoint has no tokenizer: llama.cpp opens the file, and takes ids alone"
    Export(folder).write(Root.of(tmp_path), "model")
    assert difference(tmp_path / "model.gguf", tmp_path / "model", [1, 5, 9, 200, 3]) < 1e-3
    with safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        assert len(list(file.keys())) > 20
