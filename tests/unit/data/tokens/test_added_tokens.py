"""Files beside a tokenizer: the ids are those of transformers on that folder, and on the folder of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, trainers

from shardwise.base.errors import DataError
from shardwise.data.open_data import prepare_data
from shardwise.data.tokens.tokenizer import Tokenizer, export_user_tokenizer, open_user_tokenizer
from shardwise.data.tokens.tokenizer_files import END_OF_DOCUMENT
from tests.unit.data.small_runs import config
from tests.unit.data.tokens.test_tokenizer_files import TEXT, exported, gpt2_files, piece_model


def fast_tokenizer(folder: Path, **files: object) -> tuple[Path, int]:
    """A folder with a `tokenizer.json` and these files beside it, and the size of the vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = {"special_tokens": ["<unk>", "<s>", "</s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=100, initial_alphabet=list("<>[]|/_PADXx"), **special)
    backend.train_from_iterator([line for text in TEXT for line in text.split("\n")], trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder, 100


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LSTRIP = {"lstrip": True}
NAMED = "the <x> fox<PAD>over <|im_end|> a<two>  <two>b <x><x> dog</s> <image>"
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config": {
                **FAST,
                "pad_token": "<PAD>",
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {
                    "101": {"content": "<two>", **PLAIN, "lstrip": True, "special": False},
                    "100": {"content": "<x>", **PLAIN, "special": True},
                },
            },
            "special_tokens_map": {"pad_token": "<image>"},
            "added_tokens": {"<two>": 100},
        },
        {"tokenizer_config": FAST, "added_tokens": {"<two>": 101, "<x>": 100}},
        {
            "tokenizer_config": {**FAST, "pad_token": "<PAD>", "eos_token": "</s>"},
            "special_tokens_map": {"pad_token": {"content": "<x>", **PLAIN, "rstrip": True}, "eos_token": "<|im_end|>"},
        },
        {"tokenizer_config": {**FAST, "additional_special_tokens": ["<x>", "<two>"], "image_token": "<image>"}},
        {"tokenizer_config": {**FAST, "extra_special_tokens": {"image_token": "<image>"}, "eos_token": "fox"}},
        {"tokenizer_config": {**FAST, "pad_token": {"__type": "AddedToken", "content": "<PAD>", **PLAIN, **LSTRIP}}},
    ],
)
def test_fault_12_files_beside_a_tokenizer_add_what_transformers_adds(files: dict[str, Any], tmp_path: Path) -> None:
    folder, size = fast_tokenizer(tmp_path / "own", **files)
    tokenizer = open_user_tokenizer(str(folder), 1 << 20)
    export_user_tokenizer(str(folder), tokenizer, tmp_path / "export")
    assert tokenizer.vocab_size >= size
    for place in (folder, tmp_path / "export"):
        theirs = transformers.AutoTokenizer.from_pretrained(place)
        assert theirs(NAMED, add_special_tokens=False)["input_ids"] == tokenizer.encode(NAMED).tolist()
        assert Tokenizer.load(place).encode(NAMED).tolist() == tokenizer.encode(NAMED).tolist()
        assert Tokenizer.load(place).digest == tokenizer.digest
        assert len(theirs) == tokenizer.vocab_size
        assert theirs.eos_token_id in (None, tokenizer.end_of_document_id)


@pytest.mark.parametrize(
    ("files", "model"),
    [
        ({"tokenizer_config": {"pad_token": "<PAD>"}}, "gpt2"),
        ({"added_tokens": {"<x>": 100}}, "bert"),
        ({"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast", "pad_token": "<x>"}}, "llama"),
    ],
)
def test_fault_12_a_checkpoint_has_the_ids_of_the_training(files: dict[str, Any], model: str, tmp_path: Path) -> None:
    """Whatever class transformers has for the model."""
    folder, _ = fast_tokenizer(tmp_path / "own", **files)
    tokenizer = open_user_tokenizer(str(folder), 1 << 20)
    export_user_tokenizer(str(folder), tokenizer, tmp_path / "export")
    (tmp_path / "export/config.json").write_text(json.dumps({"model_type": model}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert theirs(NAMED, add_special_tokens=False)["input_ids"] == tokenizer.encode(NAMED).tolist()


def test_fault_12_a_vocabulary_has_the_tokens_beside_it(tmp_path: Path) -> None:
    folder = gpt2_files(tmp_path / "own")
    settings = {"tokenizer_class": "GPT2Tokenizer", "pad_token": "<PAD>", "eos_token": END_OF_DOCUMENT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = open_user_tokenizer(str(folder), 301)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("fox<PAD>")["input_ids"] == tokenizer.encode("fox<PAD>").tolist()
    assert exported(folder, tmp_path / "export").pad_token_id == 300
    pieces = piece_model(tmp_path / "pieces")
    (pieces / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"}')
    assert Tokenizer.load(pieces).encode("a<unk>").tolist()[-1] == 0
    exported(pieces, tmp_path / "exported pieces")


def test_fault_12_an_id_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    folder, size = fast_tokenizer(tmp_path / "own", tokenizer_config={**FAST, "pad_token": "<PAD>"})
    with pytest.raises(DataError, match=r"set model\.vocab_size=101, which has room for '<PAD>' \(100\) too"):
        open_user_tokenizer(str(folder), size)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"added_tokens": {"<x>": 105}}, r"added_tokens\.json gives '<x>' the id 105, and in the vocabulary it is 100"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"7": {"content": "<x>"}}}},
            r"tokenizer_config\.json gives '<x>' the id 7, and in the vocabulary it is 100",
        ),
        ({"tokenizer_config": {"pad_token": {"content": "<x>", "lstrip": 1}}}, "must give each token as text or with"),
    ],
)
def test_fault_12_files_that_contradict_the_vocabulary(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder, _ = fast_tokenizer(tmp_path / "own", **files)
    with pytest.raises(DataError, match=told):
        open_user_tokenizer(str(folder), 1000)


def test_fault_15_bpe_dropout_is_off(tmp_path: Path) -> None:
    folder, size = fast_tokenizer(tmp_path / "own", tokenizer_config=FAST)
    plain = Tokenizer.load(folder).encode(TEXT[0]).tolist()
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    tokenizer = open_user_tokenizer(str(folder), size)
    assert tokenizer.encode(TEXT[0]).tolist() == plain
    assert tokenizer.note == "the tokenizer's BPE dropout (0.5) is off: a text always becomes the same tokens"
    export_user_tokenizer(str(folder), tokenizer, tmp_path / "export")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "export")(TEXT[0])["input_ids"] == plain
    assert Tokenizer.load(tmp_path / "export").note is None
    (tmp_path / "a.txt").write_text(TEXT[0])
    chosen = config(size, 8, path=str(tmp_path / "a.txt"), tokenizer=str(folder), split="1,0")
    told: list[str] = []
    for _ in range(2):
        prepare_data(chosen, tmp_path / "cache", announce=told.append)
    assert [line for line in told if "BPE dropout" in line] == [tokenizer.note]
