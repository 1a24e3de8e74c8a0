"""Five small tasks of every type of request, and a model with a tokenizer that transformers opens too."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.hugging_face import save

TASKS = ("choice", "shots", "cloze", "rolling", "writing")
_TEXTS = [
    "The ring of keys was lost in spring, and a song went with it.",
    "In autumn the song came back without the keys — naïve as ever.",
    "Nobody asked where the ring had been; the lock was new by then.",
    "A new lock needs new keys, and spring needs a song of its own.",
    "Two lines in one text:\n\nthe second begins after an empty one.",
]
VOCABULARY = 333
WINDOW = 48
_COMMON = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{start}}}}"
metadata: {{version: 1}}
"""
_CHOICE = 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\n'
_YAML = {
    "choice": _CHOICE + "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "shots": _CHOICE + "fewshot_split: test\nnum_fewshot: 2\nmetric_list: [{metric: acc}]\n",
    "cloze": 'output_type: loglikelihood\ndoc_to_target: " {{end}}"\n'
    "metric_list: [{metric: perplexity}, {metric: acc}]\n",
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{text}}"\n'
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "writing": 'output_type: generate_until\ndoc_to_target: "{{end}}"\n'
    'generation_kwargs: {until: ["e"], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n',
}


def write_tasks(folder: Path) -> Path:
    """Write the task files and their data; some texts are longer than the window, and one context is empty."""
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(_TEXTS * 2):
        words = (text * (4 if number == 6 else 1)).split(" ")
        half = len(words) // 2
        start = "" if number == 3 else " ".join(words[:half])
        end = " ".join(words[half:][:8])
        choices = [f" {end}", " keys", f" {words[0].lower()} ring", " ."]
        rows.append({"start": start, "end": end, "text": " ".join(words), "choices": choices, "label": number % 4})
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in TASKS:
        text = f"task: {name}\n{_COMMON.format(data=data)}{_YAML[name]}"
        if name == "rolling":
            text = text.replace("{{start}}", "")
        if name == "writing":  # transformers does not continue an empty text
            text = text.replace("{{start}}", "{{start or 'The'}}")
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def write_model(case: str, folder: Path, *, marks_begin: bool = False) -> Path:
    """Write a model's folder with its tokenizer; with `marks_begin` it puts a token before each text, as Llama's."""
    tokenizer = train_tokenizer([" ".join(_TEXTS)] * 3, VOCABULARY, "texts")
    size = {"n_positions": WINDOW} if case.startswith("gpt") else {"max_position_embeddings": WINDOW}
    save(case, folder, vocab_size=tokenizer.vocab_size, **size)
    tokenizer.save(folder)
    if marks_begin:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        end = str(tokenizer.end_of_document)
        backend.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
        backend.save(str(folder / "tokenizer.json"))
    return folder
