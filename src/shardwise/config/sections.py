"""The sections of a configuration other than `model`, `data`, `precision` and `launch`.

A class of a section holds its keys with their types, bounds, defaults and descriptions. The JSON schema and the pages
of keys are made of them: to add a key, write it here and read it where it has its effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from shardwise.base.errors import ConfigError
from shardwise.base.mesh_axes import degree_keys_text
from shardwise.base.notice_targets import notice_target_problem
from shardwise.base.prices import Price
from shardwise.base.redaction import has_query, redacted
from shardwise.config.base_section import Section, reject
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE, SCHEDULES, Schedule
from shardwise.config.token_counts import step_field


class HooksConfig(Section):
    """Your own functions and classes, each as package.module:Name (docs/hooks.md)."""

    data: str | None = Field(
        default=None,
        description="package.module:Name of a function or class; called with (config, part), it returns the samples "
        "of that part, instead of data.path",
    )
    loss: str | None = Field(
        default=None,
        description="package.module:Name of a function; called with (logits, targets), it returns the sum of the "
        "targets' losses",
    )
    optimizer: str | None = Field(
        default=None, description="package.module:Name of an elementwise optimizer class, in place of optimizer.name"
    )
    optimizer_options: dict[str, Any] = Field(
        default_factory=dict, examples=[{"momentum": 0.9}], description="further arguments of that class"
    )
    callbacks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=["[package.module:Name]"],
        description="package.module:Name of functions, or of classes without arguments; called on rank 0 with every "
        "event; True asks the run to stop",
    )

    @property
    def paths(self) -> dict[str, str]:
        """Every path that is given, with its key."""
        single = {"data": self.data, "loss": self.loss, "optimizer": self.optimizer}
        listed = {f"callbacks.{number}": path for number, path in enumerate(self.callbacks)}
        return {f"hooks.{key}": path for key, path in {**single, **listed}.items() if path is not None}


class CompileConfig(Section):
    """The compilation of a training: its parts, its backend, and the folder of its results."""

    enabled: bool = Field(default=False, description="compile each block and the loss of the output head")
    backend: str | None = Field(
        default=None,
        examples=["inductor"],
        description="one of torch.compile's backends; null = that of the device: neuron on Trainium, else inductor",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        examples=[{"max_autotune": True}],
        description="options of the backend, as torch.compile takes them",
    )
    cache_dir: Path | None = Field(
        default=None,
        strict=False,
        description="the folder of compiled graphs; null = the folder `compile` in $SHARDWISE_CACHE or "
        "~/.cache/shardwise",
    )
    cache_gib: float = Field(
        default=20.0, gt=0, description="largest size of that folder in GiB; above, graphs used longest ago go"
    )
    require_cached: bool = Field(default=False, description="refuse to start if a graph is not in that folder")


Recompute = Literal["none", "selective", "full"]
DropoutMode = Literal["fast", "invariant"]
TensorOverlap = Literal["pieces", "symmetric_memory"]
ContextKeys = Literal["gather", "ring"]
Switch = Literal["flash_attention_3", "update_in_backward", "cuda_graphs"]
BITWISE = "train.bitwise"
"""The key of bit-equal training, for messages."""
_SINGLE_STAGE_NAMES = " and ".join(spec.name for spec in SCHEDULES.values() if spec.is_single_stage)
_MOST_GRADIENT_GROUPS = 8
"""The largest default of `train.data_grain`, a power of two. One rank then keeps 1 + log2(8) gradients of the model."""
_MAX_SEED = 2**63 - 1  # the largest int64, which torch takes as a seed
# Patterns are compiled where they are used, so that a command which needs none of them starts faster.
BATCH_RULE = r"([1-9]\d{0,9}) per ([1-9]\d{0,9}) ranks?"
# The password of a URL: what stands between the user's name and `@`. A colon with digits is a port. A password may
# contain a slash, as the secret keys of S3 do.
_PASSWORD = r"(?<=://)[^/:@]*:(?!\d+(/|$))[^@]*(?=@)"


class ParallelConfig(Section):
    """The cut of the model; the data-parallel degree is what remains of the world."""

    tensor: int = Field(default=1, gt=0, description="tensor-parallel degree (TP)")
    sequence: bool = Field(
        default=False, description="sequence parallelism between tensor-parallel layers; no effect with TP 1"
    )
    pipeline: int = Field(default=1, gt=0, description="pipeline-parallel degree (PP)")
    schedule: Schedule = Field(default=DEFAULT_SCHEDULE, description="order of the stages' work; no effect with PP 1")
    virtual_stages: int | None = Field(
        default=None,
        gt=0,
        description=f"stages on each rank; null = 1 with {_SINGLE_STAGE_NAMES}, which allow no other number, else 2",
    )
    stages: tuple[int, ...] | None = Field(
        default=None,
        strict=False,
        examples=[[7, 7, 7, 7]],
        description="blocks of each stage, first to last; null = divided by compute cost, or equally with several "
        "stages on a rank",
    )
    context: int = Field(
        default=1,
        gt=0,
        description="context-parallel degree (CP): ranks that share the tokens of each sample; for causal families",
    )
    context_keys: ContextKeys | None = Field(
        default=None,
        description="how ranks get each other's keys and values in a block: gather = all at once; ring = rank by "
        "rank while attention computes, which holds those of two; null = gather where the step fits the device, else "
        "ring; no effect with CP 1",
    )
    expert: int = Field(
        default=1,
        gt=0,
        description="expert-parallel degree (EP): ranks that divide a block's experts; it divides the data-parallel "
        "degree × parallel.context; for families with experts",
    )
    vocab_multiple: int = Field(
        default=1,
        gt=0,
        description="rows of the embedding and of the output head on each rank are padded to a multiple of this; "
        "padding is no parameter",
    )
    tensor_overlap: TensorOverlap | None = Field(
        default=None,
        description="how tensor-parallel layers communicate behind their matmuls: pieces = a quarter of the "
        "sequence at a time; symmetric_memory = by torch's CUDA operators over NVLink, needs parallel.sequence; null "
        "= before them; no effect with TP 1",
    )
    sequence_regather: bool | None = Field(
        default=None,
        description="with parallel.sequence: true = layers gather their input again for the backward pass; false = "
        "they keep it; null = true if the step would otherwise not fit the device",
    )
    grain: int = Field(
        default=4,
        gt=0,
        description="with train.bitwise: parts in which sums over a dimension that tensor parallelism cuts are "
        "computed, at any layout; a power of two that the tensor-parallel degree divides",
    )
    context_grain: int | None = Field(
        default=None,
        gt=0,
        description="with train.bitwise: likewise of parts of the sequence; parallel.context divides it; null = equal",
    )
    replicate: int = Field(
        default=1,
        gt=0,
        description="with optimizer.zero 1, 2 or 3: copies of the tensors that are cut over data parallelism, each "
        "on neighbouring ranks, such as those of a node; must divide the data-parallel degree",
    )

    @property
    def ranks(self) -> int:
        """Ranks that compute one micro-batch."""
        return self.tensor * self.context * self.pipeline

    @property
    def model_ranks(self) -> int:
        """The fewest ranks that together hold the whole model."""
        return self.tensor * self.pipeline * math.lcm(self.context, self.expert)

    @property
    def degrees(self) -> dict[str, Any]:
        """The degrees, as arguments of `Mesh`."""
        return {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline, "expert": self.expert}

    @property
    def sequence_parts(self) -> int:
        """The resolved `context_grain`."""
        return self.context if self.context_grain is None else self.context_grain

    @property
    def cuts_sequence(self) -> bool:
        """True if sums over the tokens of a sample have several parts."""
        return self.sequence_parts > 1

    @property
    def overlaps(self) -> bool:
        """True if tensor-parallel layers communicate behind their matmuls."""
        return self.tensor > 1 and self.tensor_overlap is not None

    @property
    def keys_text(self) -> str:
        """The keys of the degrees with their values, as messages name them."""
        return degree_keys_text(self.degrees)

    @property
    def model_ranks_text(self) -> str:
        """The keys of `model_ranks` with their values."""
        return self.keys_text + (f" × parallel.expert ({self.expert})" if self.expert > 1 else "")

    @property
    def stages_per_rank(self) -> int:
        """Stages on each rank: 1 without a pipeline."""
        if self.pipeline == 1:
            return 1
        return self.virtual_stages or SCHEDULES[self.schedule].stages_per_rank


class TrainConfig(Section):
    """The length of a training, and its portions."""

    steps: int = step_field(gt=0, description="optimizer steps of the whole schedule")
    stop_after: int | None = step_field(
        None, gt=0, description="this run ends after this many steps; the schedule has train.steps"
    )
    skip_batches: int = Field(
        default=0,
        ge=0,
        description="global batches that are skipped right after checkpoint.resume=STEP, to avoid a loss spike",
    )
    global_batch: int = Field(
        gt=0,
        description="sequences per optimizer step, over all ranks; or a rule, N per M ranks, from which a new run "
        "computes the number; a resume with the same rule keeps it",
    )
    batch_rule: str | None = Field(default=None, description="the rule of global_batch, as a run stores it")
    micro_batch: int = Field(default=1, gt=0, description="sequences per forward pass on each rank")
    sequence_length: int = Field(gt=0, description="tokens per sequence")
    seed: int = Field(default=1234, ge=0, le=_MAX_SEED, description="seed of weights and data order")
    recompute: Literal[Recompute, "auto"] = Field(
        default="none",
        description="what the backward pass computes again: selective = norms, activations, rotary positions, and "
        "the attention core where no fused kernel computes it; full = each block; auto = as little as the memory "
        "allows",
    )
    dropout_mode: DropoutMode = Field(
        default="fast",
        description="fast = masks from each device's generator; invariant = the same in every layout, with more time "
        "and memory",
    )
    bitwise: bool = Field(
        default=False,
        description="every layout whose degrees divide parallel.grain and train.data_grain gives the same bits; takes "
        "more time (docs/bitwise.md)",
    )
    data_grain: int | None = Field(
        default=None,
        gt=0,
        description="with train.bitwise: groups of micro-batches in which a step's gradients are summed; a power of "
        "two that the data-parallel degree divides; null = the largest up to 8 that divides the number of"
        " micro-batches",
    )
    switches: tuple[Switch, ...] = Field(
        default=(),
        strict=False,
        examples=["[update_in_backward]"],
        description="faster ways, none measured on a GPU (docs/performance.md#past-60-mfu): flash_attention_3, "
        "update_in_backward, cuda_graphs",
    )
    threads: int = Field(
        default=1, gt=0, description="with train.bitwise: threads of each rank on a CPU, instead of OMP_NUM_THREADS"
    )
    eval_every: int = step_field(0, ge=0, description="steps between evaluations; 0 = never")
    eval_batches: int = Field(default=8, gt=0, description="global batches per evaluation")
    _by_rule: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _read_batch_rule(cls, values: Any, validate: Callable[[Any], TrainConfig]) -> TrainConfig:
        """Read `N per M ranks`: the global batch is N, until `Config.with_batch_for` knows the number of ranks."""
        given = values.get("global_batch") if isinstance(values, dict) else None
        match = re.fullmatch(BATCH_RULE, given) if isinstance(given, str) else None
        if match is None:
            return validate(values)
        # One spelling, as runs store it and compare it.
        rule = f"{match[1]} per {match[2]} rank{'' if match[2] == '1' else 's'}"
        section = validate({**values, "global_batch": int(match[1]), "batch_rule": rule})
        # Not a key: a run stores the number beside its rule, and must not compute it again.
        section._by_rule = True
        return section

    @field_validator("global_batch", mode="before")
    @classmethod
    def _batch_is_a_number_or_a_rule(cls, value: object) -> object:
        if isinstance(value, str):
            reject([f"train.global_batch ({value!r}) must be a whole number, or 'N per M ranks'"])
        return value

    @field_validator("batch_rule")
    @classmethod
    def _rule_is_one(cls, value: str | None) -> str | None:
        if value is not None and batch_per_rank(value) is None:
            reject([f"train.batch_rule ({value!r}) must be left out: train.global_batch='N per M ranks' gives a rule"])
        return value

    def last_step(self, steps_before: int) -> int:
        """The last step of a run that begins after `steps_before` steps."""
        return self.steps if self.stop_after is None else min(self.steps, steps_before + self.stop_after)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, over all ranks."""
        return self.global_batch // self.micro_batch

    @property
    def gradient_groups(self) -> int:
        """D: the resolved `data_grain`, which no layout changes."""
        return gradient_groups(self.data_grain, self.micro_batches)

    def groups_apart(self, data: int) -> int:
        """Groups whose gradients each of `data` ranks keeps apart. Two of one micro-batch are one: m + n is one sum."""
        if not self.bitwise:
            return 1
        groups = self.gradient_groups // data
        return groups // 2 if groups > 1 and self.gradient_groups == self.micro_batches else groups

    @property
    def rule(self) -> tuple[int, int] | None:
        """(N, M) where the recipe gives the global batch as `N per M ranks`, and not as a number."""
        match = re.fullmatch(BATCH_RULE, self.batch_rule or "") if self._by_rule else None
        return None if match is None else (int(match[1]), int(match[2]))


def gradient_groups(data_grain: int | None, micro_batches: int) -> int:
    """Return `train.data_grain`, or its default: the groups in which a step's gradients are added."""
    return math.gcd(micro_batches, _MOST_GRADIENT_GROUPS) if data_grain is None else data_grain


def batch_per_rank(rule: str | None) -> Fraction | None:
    """Sequences for each rank by a rule `N per M ranks` of `train.global_batch`; None for another text."""
    match = re.fullmatch(BATCH_RULE, rule or "")
    return None if match is None else Fraction(int(match[1]), int(match[2]))


class CheckpointConfig(Section):
    """The checkpoints of a run, and the source of its weights and training state."""

    every: int = step_field(0, ge=0, description="steps between checkpoints; 0 = none")
    every_minutes: float | None = Field(
        default=30.0, gt=0, description="also save when the last checkpoint is this old; null = never"
    )
    keep: int | None = Field(default=3, ge=1, description="newest checkpoints that are kept; null = all")
    keep_every: int | None = step_field(
        None, gt=0, description="also keep checkpoints whose step is a multiple of this; null = none"
    )
    memory_every: int | None = step_field(
        None,
        ge=0,
        description="steps between copies of the state in the nodes' memory, from which ranks continue when they "
        "start again; 0 = none; null = checkpoint.every in a submitted job, else none",
    )
    memory_share: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="largest fraction of a node's memory for these copies; if they need more, there are none",
    )
    resume: Literal["auto"] | int = Field(
        default="auto", description="where a run resumes: auto = its newest intact checkpoint, or a checkpoint's STEP"
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="where checkpoints are stored: a folder or a URL such as s3://bucket/run; null = checkpoints in "
        "the run's folder",
    )
    buffer_mib: float | None = Field(
        default=None,
        gt=0,
        description="host memory in MiB of each rank's copy of what it saves; with less, training waits longer; null "
        "= as the copy needs",
    )
    load: str | None = Field(
        default=None,
        min_length=1,
        description="weights to start from: a checkpoint, run or folder of checkpoints (the newest; a path or a URL),"
        " a Hugging Face folder or a hub id; null = drawn from train.seed",
    )
    revision: str | None = Field(default=None, min_length=1, description="branch, tag or commit of a hub id in load")
    companions: str | None = Field(
        default=None,
        min_length=1,
        description="a Hugging Face folder, or its config.json, from which checkpoints take ids of special tokens "
        "and generation_config.json; null = from load, else model.config, else the folder of data.tokenizer",
    )

    @field_validator("resume", mode="before")
    @classmethod
    def _resume_is_auto_or_a_step(cls, value: object) -> object:
        """Refuse with one message; pydantic would give two, and accept `true`, which is a number to Python."""
        is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value != "auto" and not is_step:
            shown = repr(value) if isinstance(value, str) else str(value).lower()
            if value is None:
                shown = "null"
            reject([f"checkpoint.resume ({shown}) must be auto, or the step of a checkpoint, such as 100"])
        return value

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        problems = []
        # A query string may hold a signature, which is as good as a password (presigned URLs of S3, tokens of Azure).
        for key, url in (("path", self.path), ("load", self.load)):
            secrets = []
            if url is not None and re.search(_PASSWORD, url):
                secrets.append("password")
            if url is not None and has_query(url):
                secrets.append("query string")
            problems += [
                f"checkpoint.{key} ({redacted(url or '')}) must hold no {secret}, which config.yaml and every manifest "
                "would show: set it in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or such as "
                "FSSPEC_FTP_USERNAME and FSSPEC_FTP_PASSWORD) or in fsspec's configuration"
                for secret in secrets
            ]
        if self.revision is not None and self.load is None:
            problems.append(f"checkpoint.revision ({self.revision!r}) needs checkpoint.load, the hub id")
        reject(problems)
        return self


class LogConfig(Section):
    """The reports of a run."""

    every: int | None = step_field(
        None,
        gt=0,
        description="steps between records, and between lines of progress without a terminal; null = a record each "
        "step, about 20 lines a run",
    )
    drift_every: int = step_field(
        100, ge=0, description="steps between comparisons of replicated parameters; 0 = only before the first step"
    )
    state_hash_every: int = step_field(
        0, ge=0, description="steps between hashes of the training's state in metrics.jsonl; 0 = none"
    )
    tensorboard: bool = Field(default=True, description="write TensorBoard scalars")
    trackers: tuple[Literal["wandb", "trackio", "mlflow"], ...] = Field(
        default=(),
        strict=False,
        examples=[["wandb"], ["wandb", "trackio"]],
        description="programs that record the same scalars: Weights & Biases (`shardwise[wandb]`; WANDB_MODE=offline "
        "needs no network), trackio (`shardwise[trackio]`) and MLflow (`shardwise[mlflow]`; MLFLOW_TRACKING_URI names "
        "its server)",
    )
    project: str | None = Field(
        default=None,
        examples=["ablations"],
        description="project of W&B and trackio, experiment of MLflow; null = as WANDB_PROJECT or MLflow's variables "
        "say, else shardwise",
    )
    run_name: str | None = Field(
        default=None, examples=["lr 3e-4"], description="name of the run in the trackers; null = that of its folder"
    )
    tags: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[["ablation"], ["ablation", "team=nlp"]],
        description="tags of the run in W&B and MLflow, there also NAME=VALUE",
    )
    price: str | None = Field(
        default=None,
        examples=["2.50 USD", "40 USD/node"],
        description="price of a device for an hour with its currency, of a node ('40 USD/node') or of a chip ('2 "
        "USD/chip'), for costs in reports and plans",
    )
    notify: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[["env:SLACK_WEBHOOK"], ["python notify.py", "https://example.org"]],
        description="commands and https addresses that are told of the run's end, failure, restart and loss spikes "
        "(docs/notices.md); env:NAME = an address in a variable",
    )
    sample_tokens: int = Field(default=64, ge=0, description="tokens generated at the end of the run; 0 = none")
    sample_prompt: str | None = Field(default=None, description="the sample's prompt; null = one from the data")
    profile: str | None = Field(
        default=None,
        description="START:STOP = torch's profiler traces the steps from START to before STOP; null = none",
    )
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        strict=False,
        examples=[[0], [0, 8]],
        description="the ranks that `log.profile` traces; null = all",
    )

    @field_validator("price", mode="before")
    @classmethod
    def _price_has_a_currency(cls, value: object) -> object:
        try:
            _ = value is None or Price.of(str(value), "log.price")
        except ConfigError as error:
            reject(error.problems)
        return value

    @field_validator("profile", mode="before")
    @classmethod
    def _profile_is_a_range_of_steps(cls, value: object) -> object:
        """Refuse every other value with one message; YAML reads `5` as a number."""
        if value is not None and not (isinstance(value, str) and _steps_of(value)):
            shown = repr(value) if isinstance(value, str) else str(value).lower()
            needs = "must be START:STOP with 1 ≤ START < STOP, such as 10:12 for the steps 10 and 11"
            reject([f"log.profile ({shown}) {needs}"])
        return value

    def name_problems(self) -> list[str]:
        """The names that a tracker would refuse after the start of the run, when it is left out, and wrong targets."""
        problems = [problem for problem in map(notice_target_problem, self.notify) if problem is not None]
        if self.project is not None and not re.fullmatch(r"[^/\\#?%:]{1,128}", self.project):
            problems.append(f"log.project ({self.project!r}) must have 1 to 128 characters, and none of / \\ # ? % :")
        if self.run_name is not None and not 1 <= len(self.run_name) <= 128:
            problems.append(f"log.run_name ({self.run_name!r}) must have 1 to 128 characters")
        part = r"\w[\w.: -]*"
        return problems + [
            f"log.tags ({tag!r}) must have 1 to 64 characters: letters, digits, and _ - . : / or blanks after the "
            "first; more after ="
            for tag in self.tags
            if len(tag) > 64 or not re.fullmatch(rf"{part}(/{part})*(=.*)?", tag)
        ]

    @property
    def profile_steps(self) -> range | None:
        """The steps that are traced."""
        return None if self.profile is None else _steps_of(self.profile)


def _steps_of(trace: str) -> range | None:
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", trace)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    return steps if steps and steps.start else None
