"""Conversations through the cache: the tokens of transformers, answers as targets, and every refusal."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from shardwise.base.errors import DataError
from shardwise.config import Config, config_from
from shardwise.data.describe import glance, glance_at_evaluation, inspect
from shardwise.data.evaluation_sets import prepare_sets
from shardwise.data.formats.chat import PreparedChat
from shardwise.data.formats.common import make_batches
from shardwise.data.open_data import prepare
from shardwise.data.reading.conversations import conversations
from shardwise.data.samples.batch import IGNORE
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from shardwise.data.tokens.tokenizer_files import CHAT_TEMPLATE

MODEL = {
    "family": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GOOD = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."}]


def config(length: int = 128, *, eval_every: int = 0, evaluation: Any = None, **data: Any) -> Config:
    return config_from(
        {
            "model": MODEL,
            "train": {"steps": 1, "global_batch": 4, "sequence_length": length, "eval_every": eval_every},
            "optimizer": {"lr": 1e-3},
            "data": data or {"dataset": "chat"},
            "evaluation": evaluation or {},
        }
    )


def opened(settings: Config, root: Path) -> PreparedChat:
    data = prepare(settings, root)
    assert isinstance(data, PreparedChat)
    return data


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_tokens_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    data = opened(config(eval_every=1), tmp_path)
    theirs = AutoTokenizer.from_pretrained(data.tokenizer_path)
    corpus = Path(importlib.import_module("shardwise.data").__file__ or "").parent / "corpus" / "chat.jsonl"
    expected = []
    for line in corpus.read_text(encoding="utf-8").splitlines():
        rendered = theirs.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
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
    assert opened(config(eval_every=1), tmp_path).fingerprint == data.fingerprint


def test_an_evaluation_opens_what_the_training_prepared(tmp_path: Path) -> None:
    built: list[str] = []
    trained = prepare(config(), tmp_path / "cache", announce=built.append)
    shutil.copytree(trained.tokenizer_path, tmp_path / "checkpoint")
    named = config(dataset="chat", tokenizer=str(tmp_path / "checkpoint"))
    evaluated = prepare(named, tmp_path / "cache", announce=built.append)
    assert len(built) == 1
    assert prepare(named, tmp_path / "other").fingerprint == evaluated.fingerprint == trained.fingerprint


def test_targets_are_the_answers_and_the_tokens_that_end_them(tmp_path: Path) -> None:
    data = opened(config(), tmp_path)
    batches = make_batches(config(), data, "train")
    assert batches is not None
    tokenizer = Tokenizer.load(data.tokenizer_path)
    targets = batches.global_batch(0, 8).inputs["targets_SB"]
    learned = tokenizer.decode(targets.T[targets.T != IGNORE])
    answers = learned.split("<|im_end|>")
    assert answers.pop() == ""
    assert all(answer[0].isupper() and answer[-1] in ".!" for answer in answers)
    assert not {"<|im_start|>", "user", "assistant", "?"} & set(learned.split())


def test_the_tokenizer_of_a_model_gets_a_template(tmp_path: Path) -> None:
    """The folder of the checkpoint then has the same template in transformers."""
    base = tmp_path / "base"
    train_tokenizer(["Who are you? A model, a user and an assistant. " * 20], 270, "base").save(base)
    path = written(tmp_path / "chat.jsonl", *[{"messages": GOOD}] * 3)
    data = opened(config(path=path, format="chat", split="1,0", tokenizer=str(base)), tmp_path / "cache")
    theirs = AutoTokenizer.from_pretrained(data.tokenizer_path)
    ids = theirs.apply_chat_template(GOOD, return_dict=False)
    assert data.beginning("train", len(ids)) == ids
    assert theirs.decode(ids) == "<|user|>\nWho are you?<|endoftext|>\n<|assistant|>\nA model.<|endoftext|>\n"
    (base / CHAT_TEMPLATE).write_text("{% for m in messages %}{{ m.role + ' ' + m.content + '!' }}{% endfor %}")
    again = opened(config(path=path, format="chat", split="1,0", tokenizer=str(base)), tmp_path / "cache")
    assert again.fingerprint != data.fingerprint


def test_one_conversation_in_a_sequence_that_is_too_short_is_cut_or_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", *[{"messages": GOOD}, {"messages": GOOD[1:] + GOOD}] * 2)
    base = tmp_path / "base"
    train_tokenizer(["Who are you? A model, a user and an assistant. " * 20], 262, "base", chat=True).save(base)
    keys = {"path": path, "format": "chat", "split": "1,0", "tokenizer": str(base)}
    data = opened(config(16, **keys), tmp_path)
    assert (
        "2 conversations cut at train.sequence_length + 1 (17 tokens); 2 conversations left out, whose" in data.summary
    )
    with pytest.raises(DataError, match=r"\(4 conversations at data\.split=1,0\) must have an answer that begins"):
        prepare(config(3, **keys), tmp_path)


LINES = {
    "{": "line 2 is not JSON",
    '{"a": ' + "[" * 70 + "]" * 70 + "}": "line 2 is not JSON that can be read (it has more than 64 levels",
    "[]": 'line 2 is JSON but not an object: each line must read like {"messages"',
    '{"text": "a"}': "line 2 has no field 'messages': set data.text_key to the field that holds the messages (text)",
    '{"messages": "a"}': "line 2: the field 'messages' must hold a list of messages, each with a role and a",
    '{"messages": [1]}': "line 2: messages.0 must be an object with a role and a content, not int",
    '{"messages": [{"content": "a"}]}': "line 2: messages.0 has no role, and it must be system, developer, user",
    '{"messages": [{"role": "bot", "content": "a"}]}': "line 2: messages.0 has the role 'bot', and it must be system",
    '{"messages": [{"role": "user", "content": null}]}': "line 2: messages.0.content must be text, or a list of parts",
    '{"messages": [{"role": "user", "content": "a"}]}': "must have a message of the role assistant, whose text is "
    "learned, and its roles are user: remove it",
    '{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}': "all of them have the weight 0, or are in",
    '{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}': "messages.0.weight (2) must be 0 or 1",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "and it is list of others: mend",
    '{"messages": [{"role": "user", "content": [{"type": "text", "text": null}]}]}': "and it is list of others: mend",
    '{"prompt": "a", "completion": 1}': "the field 'completion' must hold a list of messages, each with a role and a",
    '{"conversations": [{"from": "bot", "value": "a"}]}': "line 2: conversations.0 has the role 'bot', and it must be",
    '{"messages": [{"role": "assistant", "content": "a"}], "tools": "["}': "'tools' must hold a list of objects, or",
    '{"messages": [{"role": "assistant", "content": "a"}], "tools": [1]}': "'tools' must hold a list of objects",
    '{"messages": [{"role": "assistant", "content": "a"}], "chat_template_kwargs": {"messages": 1}}': "must be without",
    '{"messages": [{"role": "assistant", "content": "\\ud800"}]}': "the field 'messages.0' has half a surrogate pair",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_holds_no_conversation_is_refused(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "chat.jsonl", {"messages": GOOD}, line)
    with pytest.raises(DataError) as error:
        prepare(config(path=path, format="chat"), tmp_path)
    assert LINES[line] in str(error.value)
    assert path in str(error.value)
    assert len(error.value.problems) == 1


def test_empty_conversations_are_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", {"messages": GOOD}, {"messages": []}, {"messages": []})
    base = tmp_path / "base"
    train_tokenizer(["Who are you? A model. " * 20], 262, "base", chat=True).save(base)
    said: list[str] = []
    data = prepare(config(path=path, format="chat", split="1,0", tokenizer=str(base)), tmp_path, said.append)
    assert f"{path}: 2 empty conversations left out" in said
    assert f"{path}: 1 conversation," in data.summary
    inspection = inspect(path, 3, {"format": "chat"})
    assert (inspection.counts["conversations"], inspection.notes) == (1, [f"{path}: 2 empty conversations left out"])
    written(tmp_path / "chat.jsonl", {"messages": []})
    with pytest.raises(DataError, match="holds no messages: all of its conversations are empty"):
        inspect(path, 3, {"format": "chat"})


ROWS = {
    "messages": {"messages": GOOD},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "A model."}]},
    "completion": {"prompt": GOOD[:1], "completion": GOOD[1:]},
    "texts": {"prompt": "Who are you?", "completion": "A model."},
    "weight": {"messages": [*GOOD, *GOOD[:1], {**GOOD[1], "weight": 0}]},
    "prompt": {"prompt": [*GOOD, *GOOD[:1]], "completion": GOOD[1:]},
}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "datasets"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_all_kinds_have_the_same_targets(tmp_path: Path, name: str, form: str) -> None:
    base = tmp_path / "base"
    train_tokenizer(["Who are you? A model. " * 20], 262, "base", chat=True).save(base)
    if form == "jsonl":
        path = written(tmp_path / "chat.jsonl", ROWS[name])
    elif form == "datasets":
        path = str(tmp_path / "saved")
        pytest.importorskip("datasets").Dataset.from_list([ROWS[name]]).save_to_disk(path)
        (sample,) = inspect(path, 1, {"format": "chat", "tokenizer": str(base)}).samples
        assert "A model.<|im_end|>⟧" in sample.text
    else:
        arrow = pytest.importorskip("pyarrow")
        (tmp_path / "rows").mkdir()
        path = str(tmp_path / "rows/a.parquet")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist([ROWS[name]]), path)
    settings = config(path=path, format="chat", split="1,0", tokenizer=str(base))
    glanced = glance(settings)
    assert (glanced.rows[0][1].startswith(f"{path}: conversations, "), glanced.problems) == (True, [])
    data = opened(settings, tmp_path / "cache")
    chats = data.conversations["train"]
    tokenizer = Tokenizer.load(base)
    texts = [tokenizer.decode(chats.tokens[begin:end]) for begin, end in chats.answers.tolist()]
    assert texts == ["A model.<|im_end|>"]
    is_long = name in ("weight", "prompt")
    assert tokenizer.decode(chats.tokens).count("A model.") == 1 + is_long


def test_fields_that_nothing_reads_are_named_once(tmp_path: Path) -> None:
    base = tmp_path / "base"
    train_tokenizer(["Who are you? A model. " * 20], 262, "base", chat=True).save(base)
    row = {"messages": [{**GOOD[0], "name": "Ann"}, GOOD[1]], "tools": [{"name": "weather"}], "id": 3}
    path = written(tmp_path / "chat.jsonl", row, row)
    settings = config(path=path, format="chat", split="1,0", tokenizer=str(base))
    text = "neither the chat template nor the training reads the fields id, name and tools"
    assert f"; {text}" in dict(glance(settings).rows)["data"]
    told: list[str] = []
    data = prepare(settings, tmp_path / "cache", announce=told.append)
    assert [line for line in told if "warning" in line] == [f"warning: {path}: {text}"]
    assert f"; {text}" in data.summary


def test_rows_of_a_table_lack_the_fields_that_are_null(tmp_path: Path) -> None:
    """A table has each field of any row in all rows."""
    arrow = pytest.importorskip("pyarrow")
    calls = [[{"name": "a", "arguments": {"city": "Ulm"}}], [{"name": "b", "arguments": {"days": 3}}]]
    rows = [{"messages": [GOOD[0], {"role": "assistant", "content": None, "tool_calls": call}]} for call in calls]
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = Path(written(tmp_path / "a.jsonl", *rows))
    read = [
        [*conversations(path, kind, "messages")]
        for path, kind in ((tmp_path / "a.parquet", "parquet"), (lines, "jsonl"))
    ]
    assert [chat.messages for _, chat in read[0]] == [chat.messages for _, chat in read[1]]


def test_rows_of_parquet_are_read_as_lines(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    base = tmp_path / "base"
    train_tokenizer(["Who are you? A model. " * 20], 262, "base", chat=True).save(base)
    chats = [GOOD, [{"role": "system", "content": "Be kind."}, *GOOD]]
    folders = {"lines": tmp_path / "lines", "rows": tmp_path / "rows"}
    for folder in folders.values():
        folder.mkdir()
        (folder / "README.md").write_text("Conversations.\n")
    written(folders["lines"] / "a.jsonl", *[{"talk": chat} for chat in chats])
    parquet.write_table(arrow.table({"talk": chats, "id": [1, 2]}), folders["rows"] / "a.parquet")
    keys = {"format": "chat", "text_key": "talk", "split": "1,0", "tokenizer": str(base)}
    lines, rows = (opened(config(path=str(folder), **keys), tmp_path) for folder in folders.values())
    assert rows.fingerprint == lines.fingerprint
    with pytest.raises(DataError, match=r"has no column 'messages': set data\.text_key to .* \(talk and id\)"):
        prepare(config(path=str(folders["rows"]), format="chat", tokenizer=str(base)), tmp_path)


def test_a_template_that_refuses_a_conversation_names_the_line(tmp_path: Path) -> None:
    base = tmp_path / "base"
    train_tokenizer(["Who are you? A model. " * 20], 262, "base", chat=True).save(base)
    (base / CHAT_TEMPLATE).write_text("{{ raise_exception('no system') if messages[0].role == 'system' else '' }}a")
    system = [{"role": "system", "content": "Hello."}, *GOOD]
    path = written(tmp_path / "chat.jsonl", "", {"messages": system})
    with pytest.raises(DataError, match=r"chat\.jsonl: line 2: the chat template in .* refuses .* no system"):
        prepare(config(path=path, format="chat", tokenizer=str(base)), tmp_path)


def test_a_mixture_gives_the_same_inputs_of_text_and_conversations(tmp_path: Path) -> None:
    mixture = {"chat": {"dataset": "chat", "weight": 0.5}, "tiny": {"dataset": "tiny", "weight": 0.5}}
    data = prepare(config(mixture=mixture), tmp_path)
    batches = make_batches(config(mixture=mixture), data, "train")
    assert batches is not None
    batch = batches.global_batch(0, 8)
    assert batch.inputs.keys() == {"ids_SB", "targets_SB", "positions_SB", "starts_SB"}
    is_whole = (batch.inputs["targets_SB"] != IGNORE).all(axis=0)
    assert is_whole.sum() == 4


def test_an_evaluation_set_of_conversations_has_each_answer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    path = written(tmp_path / "chat.jsonl", *[{"messages": GOOD}] * 5)
    settings = config(eval_every=1, evaluation={"sets": {"mine": {"path": path, "format": "chat"}}}, dataset="chat")
    data = prepare(settings, tmp_path)
    batches = prepare_sets(settings, data).batches["mine"]
    tokenizer = Tokenizer.load(data.tokenizer_path)
    counted = sum(int(batch.counts[0]) for batch in batches.eval_batches(9, 4, 0, 1, 2))
    assert counted == 5 * len(tokenizer.encode("A model.<|im_end|>"))
    loads = settings.checkpoint.model_copy(update={"load": "runs/base"})
    glanced = glance_at_evaluation(settings.model_copy(update={"checkpoint": loads}))
    assert not glanced.problems
    assert glanced.rows[0][1].startswith(f"{path}: conversations, 1 file")


def test_answers_that_a_template_rewrites_are_counted(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(["Who are you? A model. " * 20], 262, "base", chat=True).save(tokenizer)
    # Only the last message has its text.
    template = "{% for m in messages %}[{{ m.role }}]{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}"
    prompt = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    (tokenizer / CHAT_TEMPLATE).write_text(template + prompt)
    path = written(tmp_path / "chat.jsonl", {"messages": [*GOOD, *GOOD, *GOOD]}, {"messages": GOOD})
    told: list[str] = []
    settings = config(path=path, format="chat", tokenizer=str(tokenizer), split="1,0")
    data = prepare(settings, tmp_path / "cache", announce=told.append)
    assert "; 2 answers not learned: the chat template rewrites an answer once messages follow" in data.summary
    assert [line for line in told if line.startswith(f"warning: 2 answers of {path} not learned: ")] == told[-1:]


def test_a_look_shows_what_is_trained_on(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", {"messages": GOOD}, {"messages": [*GOOD, *GOOD]})
    rows = glance(config(path=path, format="chat")).rows
    assert rows[0][1].startswith(f"{path}: conversations, 1 file of ")
    plain = inspect(path, 1, {"format": "chat"})
    assert plain.samples[0].text == "user: Who are you? assistant: ⟦A model.⟧"
    assert plain.counts["conversations"] == 2
    base = tmp_path / "base"
    train_tokenizer(["Who are you? A model. " * 20], 262, "base", chat=True).save(base)
    shown = inspect(path, 1, {"format": "chat", "tokenizer": str(base)})
    assert shown.samples[0].text == (
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n⟦A model.<|im_end|>⟧\n"
    )
    assert shown.counts["trained"] == 3 * len(Tokenizer.load(base).encode("A model.<|im_end|>"))
