"""The section `evaluation`: further texts and tasks on which a model is evaluated."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from shardwise.config.base_section import Section, reject
from shardwise.config.data import DataConfig
from shardwise.config.token_counts import step_field

_NAME = r"(?a)[A-Za-z][\w-]*"  # names of sets stand in the names of scalars


class EvaluationConfig(Section):
    """The evaluation sets and tasks, beside the part that `data.split` holds out."""

    sets: dict[str, DataConfig] = Field(
        default_factory=dict,
        examples=[{"code": "code.jsonl", "wiki": {"path": "wiki.parquet", "text_key": "body"}}],
        description="further evaluation sets by name, each a path or keys of the section data, with one part (split: "
        "1,0)",
    )
    tasks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[["arc_easy", "lambada_openai"]],
        description="tasks, groups or tags of lm_eval (`shardwise[tasks]`), by their names",
    )
    tasks_path: str | None = Field(default=None, min_length=1, description="a folder of task files (.yaml) of your own")
    tasks_every: int = step_field(0, ge=0, description="steps between evaluations on the tasks; 0 = never")
    limit: int | None = Field(default=None, gt=0, description="examples of each task that are read; null = all")

    @field_validator("sets", mode="before")
    @classmethod
    def _complete_sets(cls, sets: object) -> object:
        """Read a path as `data.path`, and let no set leave out a part of its data unless it names one."""
        if not isinstance(sets, dict):
            return sets
        return {name: _complete(values) for name, values in sets.items()}

    @field_validator("sets")
    @classmethod
    def _check_sets(cls, sets: dict[str, DataConfig]) -> dict[str, DataConfig]:
        problems = []
        for name, data in sets.items():
            key = f"evaluation.sets.{name}"
            if re.fullmatch(_NAME, name) is None:
                problems.append(f"the name of {key} must be made of letters, digits, _ and -, and begin with a letter")
            if not data.is_named:
                problems.append(f"{key} must name its data by path, blend or dataset")
            if data.tokenizer is not None:
                problems.append(f"{key}.tokenizer ({data.tokenizer}) must be left out: data.tokenizer reads every set")
            if data.mixture:
                problems.append(f"{key}.mixture must be left out: each set is of one source")
            if data.streaming:
                problems.append(f"{key}.streaming (true) must be false: an evaluation set is prepared once")
        reject(problems)
        return sets

    @model_validator(mode="after")
    def _check(self) -> EvaluationConfig:
        if self.tasks_every and not self.tasks:
            reject([f"evaluation.tasks_every ({self.tasks_every}) needs evaluation.tasks, the names of the tasks"])
        return self


def _complete(values: object) -> object:
    if isinstance(values, str):
        values = {"path": values}
    return {"split": "1,0", **values} if isinstance(values, dict) else values


def as_keys_of_set(text: str, name: Any) -> str:
    """A message on keys of `data` with the configuration keys of `evaluation.sets` in their place."""
    keys = "|".join(DataConfig.model_fields)
    # In brackets stand values: a path may look like a key.
    return re.sub(rf"(?<![\w./(-])data\.(?=(?:{keys})\b)", f"evaluation.sets.{name}.", text)
