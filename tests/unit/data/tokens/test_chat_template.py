"""Chat templates: the same text and ids as in transformers, and the places of the answers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoTokenizer

from shardwise.base.errors import DataError
from shardwise.data.reading.chat_files import Conversation, Message
from shardwise.data.tokens.chat_template import ChatTemplate, add_chat_template, encode_chats
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.data.tokens.tokenizer_files import CHAT_TEMPLATE

TEXT = ["Who are you?\nI am a model. <system> user assistant\n" * 9, "Tell me a story! Once upon a time, a fox.\n" * 9]
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "I am a model.\n"},
    {"role": "user", "content": "Tell me a story! 🦊"},
    {"role": "assistant", "content": "Once upon a time, a fox."},
]
TEMPLATES = yaml.safe_load(Path(__file__).with_name("chat_templates.yaml").read_text(encoding="utf-8"))
QWEN = TEMPLATES["qwen"]
LLAMA = TEMPLATES["llama"]
MARKED = TEMPLATES["marked"]
THINKING = TEMPLATES["thinking"]
TOOLS = TEMPLATES["tools"]
ENDLESS = TEMPLATES["endless"]
FAULTS = TEMPLATES["faults"]


def folder_with(path: Path, template: str | None, *, chat: bool = True) -> Path:
    """A tokenizer that was trained here; it has this template, or a built-in one if None is given."""
    train_tokenizer(TEXT, 300, "text", chat=chat).save(path)
    if template is None:
        add_chat_template(path, "trained")
    else:
        (path / CHAT_TEMPLATE).write_text(template)
    return path


def template_of(path: Path, template: str | None, *, chat: bool = True) -> ChatTemplate:
    return ChatTemplate.of(folder_with(path, template, chat=chat))


def answers(template: ChatTemplate, messages: Sequence[Message]) -> list[str]:
    rendered = template.rendered_chat(Conversation(messages))
    return [rendered.text[begin:end] for begin, end in rendered.answers]


@pytest.mark.parametrize("source", [None, QWEN, LLAMA, MARKED])
@pytest.mark.parametrize("chat", [True, False])
def test_text_and_ids_are_those_of_transformers(tmp_path: Path, source: str | None, chat: bool) -> None:
    template = template_of(tmp_path, source, chat=chat)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for prompt in (True, False):
        text = template.render(CHAT, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        ids = theirs.apply_chat_template(CHAT, return_dict=False, add_generation_prompt=prompt)
        assert template.tokenizer.encode(text).tolist() == ids
    assert template.rendered_chat(Conversation(CHAT)).text == template.render(CHAT, add_generation_prompt=False)
    # Answers are trained on with the token that ends them.
    end = "<|im_end|>" if chat or source else "<|endoftext|>"
    if chat or source is None:
        first = "I am a model." if source is LLAMA else "I am a model.\n"
        assert answers(template, CHAT) == [first + end, f"Once upon a time, a fox.{end}"]
        assert answers(template, CHAT[:2]) == []
        assert template.stop_tokens == (end,)


def test_an_answer_without_a_token_that_ends_it_is_trained_on_with_the_text_after_it(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = template_of(tmp_path, source)
    assert answers(template, CHAT)[1] == "Once upon a time, a fox.\n"
    assert template.stop_tokens == ("<|im_end|>",)  # of the tokenizer


def test_white_space_around_an_answer_belongs_to_it(tmp_path: Path) -> None:
    """GPT-NeoX's tokenizer leaves white space out of the offsets of a token, which a search for its start must bear."""
    file = folder_with(tmp_path, None) / "tokenizer.json"
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": trimming}))
    template = ChatTemplate.of(tmp_path)
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "  I am\n\n "}] * 2
    ((ids, found, _),) = encode_chats(template, [(lambda: "here", Conversation(messages))])
    assert [template.tokenizer.decode(ids[begin:end]) for begin, end in found.tolist()] == ["  I am\n\n <|im_end|>"] * 2


THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_of_answers_that_a_template_rewrites_the_last_one_is_learned(tmp_path: Path) -> None:
    template = template_of(tmp_path, THINKING)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    answer = "<think>\n\n</think>\n\nOnce upon a time, a fox.<|im_end|>"
    # What follows the last answer teaches nothing, and would rewrite it.
    for messages in (CHAT, [*CHAT, {"role": "user", "content": "Thanks."}]):
        rendered = template.rendered_chat(Conversation(messages))
        assert rendered.text == theirs.apply_chat_template(CHAT, tokenize=False)
        assert answers(template, messages) == [answer]
        assert rendered.left_out == 1
    assert template.rendered_chat(Conversation(CHAT[:3])).left_out == 0, "a single answer is the last one"


def test_an_answer_begins_where_it_parts_from_the_generation_prompt(tmp_path: Path) -> None:
    """As in trl 1.16: Nemotron 3's prompt, which asks for reasoning, is no beginning of an answer without it."""
    turns = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}"
        "{{ '\n' if thinking is not defined else '</think>' }}{% endif %}"
    )
    template = template_of(tmp_path, turns)
    first, second = (message["content"] for message in CHAT if message["role"] == "assistant")
    assert answers(template, CHAT) == [f"</think>{first}<|im_end|>", f"</think>{second}<|im_end|>"]
    off = template.rendered_chat(Conversation(CHAT, {"thinking": False}))
    assert [off.text[begin:end] for begin, end in off.answers] == [f"{first}<|im_end|>", f"{second}<|im_end|>"]
    # A prompt that changes what stands before the answer must not make a question part of it.
    template = template_of(tmp_path, "{{ 'think.' if add_generation_prompt else 'off.' }}" + turns)
    with pytest.raises(DataError, match="must render the beginning of a conversation as the beginning of its text"):
        template.rendered_chat(Conversation(CHAT))


def test_a_file_of_its_own_goes_before_the_settings(tmp_path: Path) -> None:
    train_tokenizer(TEXT, 300, "text", chat=True).save(tmp_path)
    assert ChatTemplate.of(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value, expected in (("S", "S"), (named, "D")):
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": value}))
        assert ChatTemplate.of(tmp_path).source == expected
    (tmp_path / CHAT_TEMPLATE).write_text("F")
    assert ChatTemplate.of(tmp_path).source == "F"
    add_chat_template(tmp_path, "it")
    assert ChatTemplate.of(tmp_path).source == "F"


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"days": {"minimum": 3}}}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Ulm", "days": 3}}}
CALLING: list[Message] = [
    {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "thinking": "A story?", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "A fox."},
    {"role": "assistant", "content": "Once upon a time."},
]


def test_tools_and_calls_of_them_are_those_of_transformers(tmp_path: Path) -> None:
    """Also by the template for tools, where a tokenizer has several."""
    variables = {"tools": [TOOL], "style": "brief"}
    chat = Conversation(CALLING, variables)
    call = '(A story?)weather{"city": "Ulm", "days": 3}<|im_end|>'
    for source in (TOOLS, QWEN):
        template = template_of(tmp_path, source)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        ((ids, found, _),) = encode_chats(template, [(lambda: "here", chat)])
        assert ids.tolist() == theirs.apply_chat_template(CALLING, return_dict=False, **variables)
        learned = [template.tokenizer.decode(ids[begin:end]) for begin, end in found.tolist()]
        assert learned == [call, "Once upon a time.<|im_end|>"]
        assert "brief" in template.tokenizer.decode(ids)
        (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(TOOLS)
    assert template.rendered_chat(Conversation(CHAT)).text == theirs.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("source", [MARKED, THINKING])
def test_an_answer_of_weight_0_is_no_target(tmp_path: Path, source: str) -> None:
    template = template_of(tmp_path, source)
    (first, *_), last = answers(template, CHAT[:3]), answers(template, CHAT)[-1]
    for number, expected in ((2, last), (4, first)):
        rendered = template.rendered_chat(Conversation(CHAT, not_learned=frozenset([number])))
        assert [rendered.text[begin:end] for begin, end in rendered.answers] == [expected]
        assert rendered.left_out == 0


def test_what_nothing_reads_is_named(tmp_path: Path) -> None:
    """A field counts as read where its name is in the template, or where the text changes with it."""
    chat = Conversation([*CALLING[1:2], {"role": "assistant", "content": "A.", "tool_calls": [CALL], "weight": 1}])
    chat = replace(chat, variables={"tools": [TOOL]})
    for source, expected in ((QWEN, {"tool_calls", "tools"}), (TOOLS, set()), (MARKED, {"tool_calls", "tools"})):
        template = template_of(tmp_path, source)
        assert template.unread(chat, ()) == expected
    named = Conversation([{"role": "user", "content": "Who?", "name": "Ann"}, *CHAT[2:3]])
    assert template.unread(named, ()) == set(), "MARKED writes the whole message"


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_writes_and_works_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Under a bound that is reached in a moment."""
    template = template_of(tmp_path, ENDLESS[name])
    messages = [{"role": "user", "content": "Once upon a time. " * 40}]
    monkeypatch.setattr("shardwise.data.tokens.template_sandbox.MOST_WORK", 1 << 20)
    with pytest.raises(DataError, match=r"refuses the conversation: it must write at most 1,048,576 characters, of"):
        template.render(messages, add_generation_prompt=True)


@pytest.mark.parametrize("source", FAULTS)
def test_a_template_that_fails_is_refused_in_one_sentence(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError) as error:
        template_of(tmp_path, source).rendered_chat(Conversation(CHAT))
    (problem,) = error.value.problems
    assert FAULTS[source] in problem
    assert str(tmp_path / CHAT_TEMPLATE) in problem


def test_a_tokenizer_without_an_end_has_no_built_in_template(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"its name has no chat template, no <.im_start.> and <.im_end.>, and no token"):
        add_chat_template(tmp_path, "its name")
