"""Conversations through the cache: the tokens of transformers, answers as targets, and every refusal."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from shardwise.base.errors import DataError
from shardwise.config import Config
from shardwise.data.evaluation_sets import prepare_evaluation_sets
from shardwise.data.open_data import prepare_data
from shardwise.data.preview import inspect_data, preview_data, preview_evaluation
from shardwise.data.reading.chat_files import conversations_of_file
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.data.tokens.tokenizer_files import CHAT_TEMPLATE
from tests.unit.data import small_runs
from tests.unit.data.small_runs import refusal, saved_tokenizer

GOOD = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."}]
CHAT = {"format": "chat", "split": "1,0"}


def config(length: int = 128, eval_every: int = 0, **data: Any) -> Config:
    return small_runs.config(320, length, eval_every, **data or {"dataset": "chat"})


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A tokenizer with a chat template."""
    return saved_tokenizer(tmp_path / "base", "Who are you? A model. " * 20, 262, chat=True)


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_tokens_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    data = prepare_data(config(eval_every=1), tmp_path)
    theirs = AutoTokenizer.from_pretrained(data.tokenizer_path)
    corpus = Path(importlib.import_module("shardwise.data").__file__ or "").parent / "corpus" / "chat.jsonl"
    expected = []
    for line in corpus.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        rendered = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        expected.append((rendered["input_ids"], rendered["assistant_masks"]))
    found = []
    for part in ("train", "eval"):
        chats = data.conversations[part]
        mask = np.zeros(len(chats.tokens), dtype=np.int64)
        for begin, end in chats.answers.tolist():
            mask[begin:end] = 1
        cuts = chats.bounds[1:-1]
        pairs = zip(np.split(chats.tokens, cuts), np.split(mask, cuts), strict=True)
        found += [(tokens.tolist(), marks.tolist()) for tokens, marks in pairs]
    assert sorted(found) == sorted(expected)
    assert 9 <= len(data.conversations["eval"].lengths) <= 16
    assert data.summary.startswith("chat: 300 conversations, 2")
    assert " KiB of messages, 19" in data.summary
    assert "40% of them in answers, vocabulary 320; 8 conversations cut at train.sequence_length + 1" in data.summary
    assert theirs.eos_token == "<|im_end|>"
    shutil.copytree(data.tokenizer_path, tmp_path / "checkpoint")
    built: list[str] = []
    for named in (config(eval_every=1), config(dataset="chat", tokenizer=str(tmp_path / "checkpoint"))):
        assert prepare_data(named, tmp_path, announce=built.append).fingerprint == data.fingerprint
    assert built == [], "a later training and an evaluation open what the first training has prepared"


def test_the_tokenizer_of_a_model_gets_a_template(tmp_path: Path) -> None:
    """The folder of the checkpoint then has the same template in transformers."""
    base = saved_tokenizer(tmp_path / "base", "Who are you? A model, a user and an assistant. " * 20, 270)
    settings = config(path=written(tmp_path / "chat.jsonl", *[{"messages": GOOD}] * 3), tokenizer=base, **CHAT)
    data = prepare_data(settings, tmp_path / "cache")
    theirs = AutoTokenizer.from_pretrained(data.tokenizer_path)
    ids = theirs.apply_chat_template(GOOD, return_dict=False)
    assert data.beginning("train", len(ids)) == ids
    assert theirs.decode(ids) == "<|user|>\nWho are you?<|endoftext|>\n<|assistant|>\nA model.<|endoftext|>\n"
    Path(base, CHAT_TEMPLATE).write_text("{% for m in messages %}{{ m.role + ' ' + m.content + '!' }}{% endfor %}")
    assert prepare_data(settings, tmp_path / "cache").fingerprint != data.fingerprint


def test_one_conversation_in_a_sequence_that_is_too_short_is_cut_or_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", *[{"messages": GOOD}, {"messages": GOOD[1:] + GOOD}] * 2)
    text = "Who are you? A model, a user and an assistant. " * 20
    keys = {"path": path, "tokenizer": saved_tokenizer(tmp_path / "base", text, 262, chat=True), **CHAT}
    data = prepare_data(config(16, **keys), tmp_path)
    assert "2 conversations cut at train.sequence_length + 1 (17 tokens); 2 conversations left out" in data.summary
    said = "(4 conversations at data.split=1,0) must have an answer that begins"
    assert said in refusal(config(3, **keys), tmp_path)


LINES = yaml.safe_load(Path(__file__).with_name("chat_lines.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("line", "text"), LINES)
def test_a_line_that_holds_no_conversation_is_refused(line: str, text: str, tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", {"messages": GOOD}, line)
    said = refusal(config(path=path, format="chat"), tmp_path)
    assert text in said
    assert path in said


def test_empty_conversations_are_left_out_and_counted(tmp_path: Path, base: str) -> None:
    path = written(tmp_path / "chat.jsonl", {"messages": GOOD}, {"messages": []}, {"messages": []})
    said: list[str] = []
    data = prepare_data(config(path=path, tokenizer=base, **CHAT), tmp_path, said.append)
    assert f"{path}: 2 empty conversations left out" in said
    assert f"{path}: 1 conversation," in data.summary
    inspection = inspect_data(path, 3, {"format": "chat"})
    assert (inspection.counts["conversations"], inspection.notes) == (1, [f"{path}: 2 empty conversations left out"])
    written(tmp_path / "chat.jsonl", {"messages": []})
    with pytest.raises(DataError, match="holds no messages: all of its conversations are empty"):
        inspect_data(path, 3, {"format": "chat"})


ROWS = {
    "ShareGPT": {"conversations": [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "A model."}]},
    "completion": {"prompt": GOOD[:1], "completion": GOOD[1:]},
    "texts": {"prompt": "Who are you?", "completion": "A model."},
    "weight": {"messages": [*GOOD, *GOOD[:1], {**GOOD[1], "weight": 0}]},
    "prompt": {"prompt": [*GOOD, *GOOD[:1]], "completion": GOOD[1:]},
}


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "jsonl") for name in ROWS), ("weight", "parquet"), ("prompt", "datasets")]
)
def test_rows_of_all_kinds_have_the_same_targets(tmp_path: Path, base: str, name: str, form: str) -> None:
    path = str(tmp_path / "rows")
    if form == "jsonl":
        written(Path(path), ROWS[name])
    elif form == "datasets":
        pytest.importorskip("datasets").Dataset.from_list([ROWS[name]]).save_to_disk(path)
        (sample,) = inspect_data(path, 1, {"format": "chat", "tokenizer": base}).samples
        assert "A model.<|im_end|>⟧" in sample.text
    else:
        table = pytest.importorskip("pyarrow").Table.from_pylist([ROWS[name]])
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    settings = config(path=path, tokenizer=base, **CHAT)
    glanced = preview_data(settings)
    assert (glanced.rows[0][1].startswith(f"{path}: conversations, "), glanced.problems) == (True, [])
    chats = prepare_data(settings, tmp_path / "cache").conversations["train"]
    tokenizer = Tokenizer.load(Path(base))
    texts = [tokenizer.decode(chats.tokens[begin:end]) for begin, end in chats.answers.tolist()]
    assert texts == ["A model.<|im_end|>"]
    is_long = name in ("weight", "prompt")
    assert tokenizer.decode(chats.tokens).count("A model.") == 1 + is_long


def test_rows_of_a_table_lack_the_fields_that_are_null(tmp_path: Path) -> None:
    """A table has each field of any row in all rows."""
    calls = [[{"name": "a", "arguments": {"city": "Ulm"}}], [{"name": "b", "arguments": {"days": 3}}]]
    rows = [{"messages": [GOOD[0], {"role": "assistant", "content": None, "tool_calls": call}]} for call in calls]
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    written(tmp_path / "a.jsonl", *rows)
    both = (conversations_of_file(tmp_path / f"a.{kind}", kind, "messages") for kind in ("parquet", "jsonl"))
    of_table, of_lines = ([chat.messages for _, chat in chats] for chats in both)
    assert of_table == of_lines
    with pytest.raises(DataError, match=r"has no column 'talk': set data\.text_key to .* \(messages\)"):
        list(conversations_of_file(tmp_path / "a.parquet", "parquet", "talk"))


def test_calls_of_tools_are_read_from_sharegpt(tmp_path: Path) -> None:
    """As LLaMA-Factory has them: a call is the JSON text of a message from `function_call`."""
    call = {"name": "weather", "arguments": {"city": "Ulm"}}
    for text, count in ((json.dumps(call), 1), (json.dumps([call, call]), 2)):
        senders = {"human": "Rain?", "function_call": text, "observation": "Rain.", "gpt": "Yes."}
        row = {"conversations": [{"from": sender, "value": value} for sender, value in senders.items()]}
        ((_, chat),) = conversations_of_file(Path(written(tmp_path / "a.jsonl", row)), "jsonl", "messages")
        assert chat.messages == [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call}] * count},
            {"role": "tool", "content": "Rain."},
            {"role": "assistant", "content": "Yes."},
        ]


def test_an_evaluation_set_of_chats_has_each_answer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    path = written(tmp_path / "chat.jsonl", *[{"messages": GOOD}] * 5)
    sets = {"mine": {"path": path, "format": "chat"}}
    settings = config(eval_every=1, evaluation={"sets": sets}, dataset="chat")
    data = prepare_data(settings, tmp_path)
    batches = prepare_evaluation_sets(settings, data).batches["mine"]
    counted = sum(int(batch.counts[0]) for batch in batches.eval_batches(9, 4, 0, 1, 2))
    assert counted == 5 * len(Tokenizer.load(data.tokenizer_path).encode("A model.<|im_end|>"))
    glanced = preview_evaluation(settings.with_keys(checkpoint={"load": "runs/base"}))
    assert not glanced.problems
    assert glanced.rows[0][1].startswith(f"{path}: conversations, 1 file")


def test_a_look_shows_what_is_trained_on(tmp_path: Path, base: str) -> None:
    path = written(tmp_path / "chat.jsonl", {"messages": GOOD}, {"messages": [*GOOD, *GOOD]})
    rows = preview_data(config(path=path, format="chat")).rows
    assert rows[0][1].startswith(f"{path}: conversations, 1 file of ")
    plain = inspect_data(path, 1, {"format": "chat"})
    assert plain.samples[0].text == "user: Who are you? assistant: ⟦A model.⟧"
    assert plain.counts["conversations"] == 2
    shown = inspect_data(path, 1, {"format": "chat", "tokenizer": base})
    assert shown.samples[0].text == (
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n⟦A model.<|im_end|>⟧\n"
    )
    assert shown.counts["trained"] == 3 * len(Tokenizer.load(Path(base)).encode("A model.<|im_end|>"))
