"""Tasks that cannot be scored are refused before a rank starts."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError, DataError
from shardwise.config import Config, load_config
from shardwise.data.evaluation_tasks import require_tasks
from tests.task_files import write_tasks


def config_of(tasks: list[str], folder: Path) -> Config:
    return load_config("llama2-tiny", [f"evaluation.tasks=[{','.join(tasks)}]", f"evaluation.tasks_path={folder}"])


def required(tasks: list[str], folder: Path, tokenizer: Path | None) -> None:
    config = config_of(tasks, folder)
    require_tasks(config.evaluation, config.model, config.train, tokenizer)


def refusal(tasks: list[str], folder: Path, **further: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        required(tasks, folder, **{"tokenizer": folder, **further})
    assert raised.value.exit_code == 2
    (problem,) = raised.value.problems
    return problem


def test_what_tasks_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(["choice", "cloze"], tmp_path, tokenizer=None) == (
        "evaluation.tasks (choice and cloze) need data.tokenizer, as the data hold only tokens: name what made them"
    )
    none = tmp_path / "none"
    told = f"evaluation.tasks_path ({none}) must be a folder of task files (.yaml), and it is none"
    assert refusal(["choice"], none) == told
    folder = write_tasks(tmp_path / "tasks")
    (folder / "rows.jsonl").unlink()
    told = f"the data of evaluation.tasks (cloze) cannot be read: Unable to find '{folder / 'rows.jsonl'}'"
    assert refusal(["cloze"], folder) == told
    with pytest.raises(DataError):
        required(["cloze"], folder, folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    told = "evaluation.tasks needs the package lm_eval: pip install 'shardwise[tasks]'"
    assert refusal(["choice"], tmp_path) == told


def test_what_no_model_here_has(tmp_path: Path) -> None:
    for line, problem in (
        (
            'generation_kwargs: {until: ["e"], num_beams: 4, temperature: 1, min_p: 0.1, max_gen_toks: 9}',
            "generation_kwargs of evaluation.tasks (writing) must be until, max_gen_toks, do_sample, temperature, "
            "top_p and top_k at most, and not num_beams and min_p",
        ),
        (
            "generation_kwargs: {max_gen_toks: 512}",
            "max_gen_toks of evaluation.tasks (writing, 512) must be less than the tokens that the model reads (64)",
        ),
        ("unsafe_code: true", "evaluation.tasks (writing) must not run code that a model writes, and this task does"),
    ):
        folder = write_tasks(tmp_path / "tasks")
        file = folder / "writing.yaml"
        kept = [text for text in file.read_text().splitlines() if text.partition(":")[0] != line.partition(":")[0]]
        file.write_text("\n".join([*kept, line]))
        assert refusal(["writing"], folder) == problem
