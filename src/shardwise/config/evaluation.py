"""The section `evaluation`: further texts and tasks on which a model is evaluated."""

from __future__ import annotations

from pydantic import Field, model_validator

from shardwise.config.base_section import Section, reject
from shardwise.config.token_counts import step_field


class EvaluationConfig(Section):
    """The evaluation sets and tasks, beside the part that `data.split` holds out."""

    tasks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[["arc_easy", "lambada_openai"]],
        description="tasks, groups or tags of lm_eval (`shardwise[tasks]`), by their names",
    )
    tasks_path: str | None = Field(
        default=None, min_length=1, description="a folder of your own task files (.yaml) in the format of lm_eval"
    )
    tasks_every: int = step_field(0, ge=0, description="steps between evaluations on the tasks; 0 = never")
    limit: int | None = Field(default=None, gt=0, description="the examples of each task that are read; null = all")

    @model_validator(mode="after")
    def _check(self) -> EvaluationConfig:
        if self.tasks_every and not self.tasks:
            reject([f"evaluation.tasks_every ({self.tasks_every}) needs evaluation.tasks, the names of the tasks"])
        return self
