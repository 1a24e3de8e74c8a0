"""What lies beside the weights that a run starts from, and stays beside those that it saves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from shardwise.base import hub
from shardwise.checkpoint.companions import Companions, find_checkpoint_companions, model_files
from shardwise.checkpoint.format.model_files import files_beside_weights
from shardwise.checkpoint.format.weight_files import BESIDE_WEIGHTS
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, UserModelConfig, checked_data_section, config_from_sections, load_config
from shardwise.data.cache import tokenizer_digest
from shardwise.data.tokens.tokenizer import Tokenizer, export_user_tokenizer, train_tokenizer

END, TURN, PAD = 0, 258, 259
IDS = {"bos_token_id": 1, "eos_token_id": [END, TURN], "pad_token_id": PAD}
GENERATION = {"eos_token_id": [TURN, END], "temperature": 0.6}


def tokenizer(folder: Path, *, end: str = "<|endoftext|>", tokens: tuple[str, ...] = ("<|turn|>", "<|pad|>")) -> Path:
    """A byte-level BPE with two more special tokens."""
    train_tokenizer(["some text " * 9], 258, "text").save(folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    like = described["added_tokens"][0]
    described["added_tokens"] += [like | {"id": TURN + i, "content": token} for i, token in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (folder / "special_tokens_map.json").unlink()  # transformers would prefer its tokens
    return folder


def published(folder: Path) -> Path:
    """A model's folder, without weights."""
    tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **IDS, "sep_token_id": None}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def run_of(**checkpoint: Any) -> Config:
    return load_config("llama2-tiny", [f"checkpoint.{key}={value}" for key, value in checkpoint.items()])


def generation_of(companions: Companions) -> Any:
    return json.loads(companions.files["generation_config.json"])


def replace_fields(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return published(tmp_path / "published")


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The folder of a tokenizer of 305 tokens."""
    train_tokenizer([MIXED * 60], 305, "text").save(tmp_path / "own")
    return tmp_path / "own"


def test_fault_09_ids_and_generation_stay_where_they_mean_the_same_tokens(tmp_path: Path, weights: Path) -> None:
    """Of loaded weights, of `checkpoint.companions` and of the tokenizer's folder; more tokens do no harm."""
    own = tokenizer(tmp_path / "own", end="<|turn|>", tokens=("<|turn|>", "<|pad|>", "<|more|>"))
    whole = Companions(IDS, {"generation_config.json": (weights / "generation_config.json").read_bytes()})
    for data in (weights, own):
        assert find_checkpoint_companions(run_of(), Root.of(weights), data) == whole
        assert find_checkpoint_companions(run_of(companions=weights), None, data) == whole
        assert find_checkpoint_companions(run_of(companions=weights / "config.json"), None, data) == whole
    named = load_config("llama2-tiny", [f"data.tokenizer={weights / 'tokenizer.json'}"])
    assert find_checkpoint_companions(named, Root.of(tmp_path / "nothing"), weights) == whole
    alone = tmp_path / "alone.json"
    alone.write_bytes((weights / "config.json").read_bytes())
    assert find_checkpoint_companions(run_of(companions=alone), None, own) == Companions(IDS)


def test_a_run_on_conversations_ends_a_text_where_the_template_ends_an_answer(tmp_path: Path, weights: Path) -> None:
    template = "{% for m in messages %}{{ m.role + m.content + '<|pad|>' }}{% endfor %}"
    (weights / "chat_template.jinja").write_text(template)
    chat = load_config("sft-tiny")
    found = find_checkpoint_companions(chat, Root.of(weights), weights)
    assert found.ids == IDS | {"eos_token_id": [END, TURN, PAD]}
    assert generation_of(found) == GENERATION | {"eos_token_id": [TURN, END, PAD]}
    assert find_checkpoint_companions(run_of(), Root.of(weights), weights).ids == IDS
    mixed = chat.model_copy(
        update={"data": checked_data_section({"mixture": {"a": {"dataset": "chat", "weight": 1.0}}})}
    )
    assert find_checkpoint_companions(mixed, None, weights).ids == {"eos_token_id": [END, PAD]}
    own = tokenizer(tmp_path / "own")
    (own / "chat_template.jinja").write_text(template)
    files = model_files(chat.model, torch.float32, own, find_checkpoint_companions(chat, None, own))
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [END, PAD]
    # Where the end of a document ends an answer, nothing changes.
    (weights / "chat_template.jinja").write_text(template.replace("<|pad|>", "<|endoftext|>"))
    assert find_checkpoint_companions(chat, Root.of(weights), weights).ids == IDS


def test_fault_09_what_the_user_names_goes_first_and_data_of_tokens_keep_the_tokenizer(
    tmp_path: Path, weights: Path
) -> None:
    own = tokenizer(tmp_path / "own", end="<|pad|>")
    found = find_checkpoint_companions(run_of(), Root.of(weights), own)
    assert found.ids == {"bos_token_id": 1, "eos_token_id": PAD, "pad_token_id": PAD}
    assert generation_of(found) == {"eos_token_id": PAD, "temperature": 0.6}
    assert "the checkpoints end a text with <|pad|>, as the data's tokenizer does, and not with <|end" in found.notes[0]
    other = tokenizer(tmp_path / "other", tokens=("<|pad|>", "<|turn|>"))
    found = find_checkpoint_companions(run_of(), Root.of(weights), other)
    assert not found.ids
    assert not found.files
    assert "the checkpoints have the special tokens of the data's tokenizer, and not those of" in found.notes[0]
    (other / "config.json").write_text(json.dumps({"eos_token_id": [END, TURN + 1]}))
    beside = load_config("llama2-tiny", [f"data.tokenizer={other}"])
    assert find_checkpoint_companions(beside, Root.of(weights), other) == Companions({"eos_token_id": [END, TURN + 1]})
    found = find_checkpoint_companions(run_of(), Root.of(weights), None)
    files = model_files(load_config("llama2-tiny").model, torch.bfloat16, None, found)
    described = json.loads(files.pop("config.json"))
    assert {name: described[name] for name in IDS} == IDS
    there = {file.name: file.read_bytes() for file in weights.iterdir() if file.name != "config.json"}
    settings = [json.loads(beside.pop("tokenizer_config.json")) for beside in (files, there)]
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    assert settings[0] == {**settings[1], **inputs, "tokenizer_class": "PreTrainedTokenizerFast"}
    assert files == there


MIXED = "It's 1234567 o'clock,  two  spaces\n\n\tand DON'T 99 über-naïve 修道士!!! "
QWEN2: dict[str, Any] = {
    "family": "qwen2", "vocab_size": 305, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_tokenizer_that_transformers_splits_otherwise_is_named(split: Path) -> None:
    """Whatever the files say, transformers takes the class of Qwen 2 for this model type."""
    train = {"steps": 1, "global_batch": 1, "sequence_length": 8}
    run = config_from_sections({"model": QWEN2, "train": train, "optimizer": {"lr": 1.0}})
    (note,) = find_checkpoint_companions(run, None, split).notes
    assert note.startswith("AutoTokenizer of transformers 5 splits text for model_type qwen2 by rules of its own")
    (split / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    ids = [opener.from_pretrained(split)(MIXED)["input_ids"] for opener in (AutoTokenizer, PreTrainedTokenizerFast)]
    ours = Tokenizer.load(split).encode(MIXED).tolist()
    assert [found == ours for found in ids] == [False, True]
    rebuilt = json.loads(AutoTokenizer.from_pretrained(split).backend_tokenizer.to_str())
    replace_fields(split / "tokenizer.json", **{step: rebuilt[step] for step in ("normalizer", "pre_tokenizer")})
    assert find_checkpoint_companions(run, None, split).notes == ()


def test_fault_09_keys_and_special_tokens_are_the_models(tmp_path: Path) -> None:
    ids = Companions({"pad_token_id": 7, "sep_token_id": 5, "eos_token_id": [2, 3]})
    bert = json.loads(model_files(load_config("bert-tiny").model, torch.float32, None, ids)["config.json"])
    assert (bert["pad_token_id"], bert["sep_token_id"]) == (0, 5)
    own = UserModelConfig(family="package.module:Class", vocab_size=9)
    assert json.loads(model_files(own, torch.float32, None, ids)["config.json"]).keys() == {
        *own.model_dump(), "torch_dtype", "bos_token_id", "eos_token_id",
    }  # fmt: skip
    # Without them transformers would end a text at Llama 2's `</s>`, id 2: in most vocabularies a letter.
    own = tokenizer(tmp_path / "own")
    beginning = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<|turn|>", "lstrip": False}}
    (own / "tokenizer_config.json").write_text(json.dumps(beginning))
    files = model_files(load_config("llama2-tiny").model, torch.float32, own)
    assert files.keys() == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes(files[name])
    for found in (AutoConfig.from_pretrained(tmp_path), GenerationConfig.from_pretrained(tmp_path)):
        assert (found.eos_token_id, found.bos_token_id) == (END, TURN)


def test_fault_09_chat_templates_of_every_kind_are_kept(tmp_path: Path, weights: Path) -> None:
    """The older file, and those with names, with and without a tokenizer of the data."""
    (weights / "chat_template.json").write_text("{}")
    (weights / "additional_chat_templates").mkdir()
    (weights / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    templates = {"chat_template.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    export_user_tokenizer(str(weights), Tokenizer.load(weights), tmp_path / "data")
    for data in (None, tmp_path / "data"):
        found = find_checkpoint_companions(run_of(), Root.of(weights), data)
        assert model_files(load_config("llama2-tiny").model, torch.bfloat16, data, found).items() >= templates.items()
        assert found.ids == IDS
    before = tokenizer_digest(tmp_path / "data")
    (tmp_path / "data" / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"{{ tools }}\n")
    assert tokenizer_digest(tmp_path / "data") != before
    beside = Root.of(weights)
    assert files_beside_weights(beside).items() >= templates.items()
    allowed, ignored = (*BESIDE_WEIGHTS, "model-*.safetensors"), hub._IN_FOLDERS
    there = [*templates, "tokenizer/x", "original/tokenizer.json", "LICENSES/x", "added/model-1.safetensors"]
    assert [*filter_repo_objects(there, allow_patterns=[*allowed], ignore_patterns=[ignored])] == [*templates]
