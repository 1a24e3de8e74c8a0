"""The `optimizer` section: the update rule, its schedule and its sharding."""

from __future__ import annotations

import itertools
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shardwise.base.errors import listing
from shardwise.config.base_section import RuleTable, Section, broken_rules, reject
from shardwise.config.learning_rate_specs import LEARNING_RATES
from shardwise.config.optimizer_specs import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerSpec
from shardwise.config.token_counts import step_field

_LONG_WARMUP, _USUAL_WARMUP = 4, 50
"""One in so many steps is much for a warmup, which may be that of a longer run, or usual."""
DecayShape = Literal["linear", "cosine", "sqrt"]
Frequency = Literal["micro_batch", "step"]


class RatePoint(Section):
    """An entry of `optimizer.points`: the learning rate at a step, and the way to it from the point before."""

    at: int = step_field(ge=0, description="the step")
    factor: float = Field(ge=0, description="the rate, as a fraction of optimizer.lr")
    shape: DecayShape = Field(default="linear", description="the shape of the curve from the point before")


class MuonConfig(Section):
    """Options of Muon, which updates the matrices of blocks."""

    adamw_lr: float | None = Field(
        default=None,
        gt=0,
        description="peak learning rate of AdamW, for all but matrices of blocks; null = optimizer.lr",
    )
    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay rate of the momentum")
    nesterov: bool = Field(default=True, description="Nesterov's momentum")
    ns_steps: int = Field(default=5, ge=1, le=99, description="steps of the Newton–Schulz iteration")
    ns_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="dtype of the iteration; null = bfloat16 on accelerators, float32 on CPUs"
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        default="match_rms_adamw",
        description="factor of a matrix's step: original = √max(1, out / in), match_rms_adamw = 0.2 · √max(out, in), "
        "which is for learning rates of AdamW",
    )
    split_heads: bool = Field(default=False, description="each attention head of Q, K and V is a matrix")

    def dtype(self, accelerator: bool) -> Literal["float32", "bfloat16"]:
        """The dtype of the iteration on a kind of device."""
        return self.ns_dtype or ("bfloat16" if accelerator else "float32")


_RULES: RuleTable = {
    "spec.has_trust_ratios !weight_decay": (
        "optimizer.weight_decay ({=optimizer.weight_decay}) must be greater than 0 with optimizer.name "
        "{=optimizer.name}, which gives a trust ratio to what decays: set 0.01, or optimizer.name=adamw",
    ),
    "!spec.has_trust_ratios": (
        "{optimizer.trust_clip} must be false with optimizer.name {=optimizer.name}, which has no trust ratios: leave "
        "it out, or set optimizer.name=lamb",
    ),
    "spec.needs_whole_tensors": (
        "{optimizer.offload} must be false with optimizer.name {=optimizer.name}, which needs whole tensors: leave it "
        "out, or set optimizer.name=adamw",
    ),
}


class OptimizerConfig(Section):
    """The update rule, its schedule and its sharding."""

    name: str = Field(
        default=DEFAULT_OPTIMIZER, description="the update rule", json_schema_extra={"enum": [*OPTIMIZERS]}
    )
    lr: float = Field(gt=0, description="peak learning rate")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the end of the decay")
    warmup_steps: int = step_field(0, ge=0, description="steps of linear warmup")
    constant_steps: int = step_field(0, ge=0, description="steps at the run's end, after the decay, with min_lr")
    schedule: str = Field(
        default="cosine",
        json_schema_extra={"enum": [*LEARNING_RATES]},
        description="rates after the warmup: linear and cosine decay to min_lr over the run, constant = lr, wsd = "
        "lr with a decay in the last decay_steps, points = optimizer.points from step 1",
    )
    decay_steps: int | None = step_field(
        None, ge=0, description="with wsd, which needs it: steps of the decay to min_lr; 0 = none, for a trunk of runs"
    )
    decay_shape: DecayShape = Field(
        default="linear",
        description="with wsd: shape of the decay, where p goes from 0 to 1: 1 - p, (1 + cos πp) / 2 or 1 - √p",
    )
    router_bias_rate: float = Field(
        default=0.001,
        ge=0,
        description="with routers that have a correction bias: by how much a step raises the bias of an expert with "
        "fewer tokens than the mean, and lowers that of one with more; 0 = none",
    )
    router_sequence_loss: float = Field(
        default=0.0,
        ge=0,
        description="with experts: coefficient of DeepSeek's balance loss by sequence, 1 where loads are balanced, "
        "summed over blocks; 0 = none",
    )
    router_batch_loss: float = Field(
        default=0.0,
        ge=0,
        description="with experts: coefficient of the Switch loss over the global batch, 1 where loads are "
        "balanced, summed over blocks; with several micro-batches or a pipeline, each step begins with a counting pass",
    )
    router_pooled_loss: float = Field(
        default=0.0,
        ge=0,
        description="with experts: coefficient of the balance loss of transformers, over all blocks and the global "
        "batch as one, num_experts_per_tok where loads are balanced; each step begins with a counting pass",
    )
    router_z_loss: float = Field(
        default=0.0,
        ge=0,
        description="with experts: coefficient of the mean squared log-sum-exp of routers' logits, summed over blocks; "
        "0 = none",
    )
    points: tuple[RatePoint, ...] = Field(
        default=(),
        strict=False,
        examples=[[{"at": 0, "factor": 0}, {"at": "100M", "factor": 1}, {"at": "2B", "factor": 0.1}]],
        description="with points: the rate at some steps",
    )
    weight_decay: float = Field(default=0.01, ge=0, description="decoupled decay; none on what no_decay names")
    no_decay: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        examples=[["*.embed_tokens.weight"]],
        description="patterns of names of weights that do not decay, such as *.embed_tokens.weight; [] = none; null ="
        " biases and norms",
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False, description="decay rates of the two moments")
    eps: float = Field(
        default_factory=lambda data: OPTIMIZERS[data.get("name", DEFAULT_OPTIMIZER)].eps,
        gt=0,
        description="added to the denominator; default: 1e-8, and 1e-6 with lamb",
    )
    trust_clip: bool = Field(default=False, description="with lamb: no trust ratio is above 1")
    muon: MuonConfig = Field(default_factory=MuonConfig, description="with muon: its options")
    max_norm: float | None = Field(default=1.0, gt=0, description="clip the gradient norm to this; null = no clipping")
    zero: Literal[0, 1, 2, 3] = Field(
        default=1,
        description="stage of ZeRO: what is cut over data parallelism: 0 = nothing, 1 = masters and optimizer "
        "state, 2 = gradients too, 3 = weights too",
    )
    reduce: Frequency | None = Field(
        default=None,
        description="with zero 2 or 3: gradients are reduced in each micro_batch, or once a step, which sends less "
        "and holds all gradients; null = step with train.bitwise and with schedules that split the backward pass, "
        "else micro_batch",
    )
    gather: Frequency | None = Field(
        default=None,
        description="with zero 3: weights are gathered for each pass of a micro_batch, or once a step, which sends "
        "less and holds all weights; null = step with schedules that split the backward pass, else micro_batch",
    )
    prefetch: int = Field(
        default=1, ge=0, le=99, description="with zero 3: units (blocks) whose weights are gathered ahead"
    )
    offload: bool = Field(
        default=False, description="on accelerators, with adamw: the host holds and updates masters and optimizer state"
    )
    bucket_mib: float | None = Field(
        default=None,
        gt=0,
        description="MiB of gradients that are reduced at once; null = √(MiB of gradients · data-parallel ranks · 1 "
        "on accelerators, 1/8 on CPUs), at least 1",
    )

    def sharding_text(self, replicate: int) -> str:
        """The stage of ZeRO with `parallel.replicate`, such as `ZeRO-3 (replicate 4, reduce step)`."""
        options = [f"replicate {replicate}"] if self.zero and replicate > 1 else []
        if self.zero >= 2 and self.reduce == "step":
            options.append("reduce step")
        if self.zero == 3 and self.gather == "step":
            options.append("gather step")
        if self.offload:
            options.append("offload")
        return f"ZeRO-{self.zero}" + (f" ({', '.join(options)})" if options else "")

    def long_warmup(self, steps: int) -> list[tuple[str, str]]:
        """The row that warns of a warmup of much of a run of so many steps; none for a usual one, or a short run."""
        if steps < _USUAL_WARMUP or _LONG_WARMUP * self.warmup_steps <= steps:
            return []
        share = f"optimizer.warmup_steps ({self.warmup_steps:,}) is {self.warmup_steps / steps:.0%} of train.steps"
        return [("warning", f"{share} ({steps:,}): optimizer.warmup_steps={steps // _USUAL_WARMUP} is 2%")]

    def steps_without_rate(self, steps: int) -> list[str]:
        """Return a note if the learning rates of `points` end at 0 before the last of so many steps."""
        return [
            f"steps {point.at:,} to {steps:,} (train.steps) have a learning rate of 0, as optimizer.points end: "
            "lower train.steps, or move that point"
            for point in self.points[-1:]
            if point.factor == 0 and point.at < steps
        ]

    @property
    def chooses_bias_rate(self) -> bool:
        """True if the step of routers' biases is another one than the default."""
        return bool(self.router_bias_rate != type(self).model_fields["router_bias_rate"].default)

    def counts_rows_first(self, micro_batches: int, pipeline: int) -> bool:
        """Return whether each step begins with a forward pass that only counts the rows of experts."""
        losses = self.router_losses
        return "pooled" in losses or ("batch" in losses and (micro_batches > 1 or pipeline > 1))

    @property
    def router_losses(self) -> dict[str, float]:
        """Coefficients of the objectives of routers that are computed, by the names of `layers/balance.py`."""
        coefficients = {
            "sequence": self.router_sequence_loss,
            "batch": self.router_batch_loss,
            "pooled": self.router_pooled_loss,
            "z": self.router_z_loss,
        }
        return {name: coefficient for name, coefficient in coefficients.items() if coefficient}

    @property
    def cuts_gradients(self) -> bool:
        """True if each rank holds the gradients of its own part alone."""
        return self.zero >= 2

    @property
    def idle_keys(self) -> list[str]:
        """Keys with a value that has no effect at this stage of ZeRO."""
        least_stages = {"reduce": 2, "gather": 3, "prefetch": 3}
        fields = type(self).model_fields
        return [
            key
            for key, stage in least_stages.items()
            if self.zero < stage and getattr(self, key) != fields[key].default
        ]

    @property
    def spec(self) -> OptimizerSpec:
        """The record of the optimizer that `name` names."""
        return OPTIMIZERS[self.name]

    @field_validator("name", "schedule", mode="before")
    @classmethod
    def _has_a_record(cls, value: object, info: ValidationInfo) -> object:
        # Not a `Literal`, so that a record is all that a new optimizer or schedule needs.
        records = OPTIMIZERS if info.field_name == "name" else LEARNING_RATES
        name = str(value).lower()
        if name not in records:
            hint = ", or name a class by hooks.optimizer" if records is OPTIMIZERS else ""
            reject([f"optimizer.{info.field_name} ({value!r}) must be {listing(records, 'or')}{hint}"])
        return name

    @field_validator("zero", mode="before")
    @classmethod
    def _zero_is_a_stage(cls, value: object) -> object:
        """Refuse `true`: Python takes it for 1, but it is no stage of ZeRO."""
        if isinstance(value, bool):
            reject([f"optimizer.zero ({str(value).lower()}) must be 0, 1, 2 or 3"])
        return value

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        problems = []
        if self.min_lr > self.lr:
            problems.append(f"optimizer.min_lr ({self.min_lr}) must be at most optimizer.lr ({self.lr})")
        problems += self._schedule_problems()
        if not all(0 <= beta < 1 for beta in self.betas):
            problems.append(f"optimizer.betas ({list(self.betas)}) must lie in [0, 1)")
        problems += broken_rules(_RULES, self, "optimizer")
        if not self.spec.orthogonalizes and self.muon != MuonConfig():
            default = MuonConfig()
            keys = (key for key in MuonConfig.model_fields if getattr(self.muon, key) != getattr(default, key))
            problems.append(
                f"{listing(f'optimizer.muon.{key}' for key in keys)} must be left out with optimizer.name {self.name}, "
                "which orthogonalizes no matrices: set optimizer.name=muon"
            )
        reject(problems)
        return self

    def _schedule_problems(self) -> list[str]:
        schedule = LEARNING_RATES[self.schedule]
        given = {key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default}
        problems = [
            f"optimizer.{key} must be given with optimizer.schedule {self.schedule}: {example}"
            for key, example in schedule.needs.items()
            if key not in given
        ]
        for spec in LEARNING_RATES.values():
            if keys := [key for key in spec.keys if key in given and key not in schedule.keys]:
                problems.append(self._left_out(keys, f"set optimizer.schedule={spec.name}"))
        if keys := [key for key in schedule.excludes if key in given]:
            problems.append(self._left_out(keys, schedule.reason))
        for before, after in itertools.pairwise(self.points):
            if after.at <= before.at:
                problems.append(
                    f"optimizer.points must have rising steps: the point at step {after.at} comes after that at step "
                    f"{before.at}"
                )
        return problems

    def _left_out(self, keys: list[str], fix: str) -> str:
        values = {key: getattr(self, key) for key in keys}
        shown = [f"optimizer.{key}" + ("" if isinstance(v, tuple) else f" ({v})") for key, v in values.items()]
        return f"{listing(shown)} must be left out with optimizer.schedule {self.schedule}: {fix}"
